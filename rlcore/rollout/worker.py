"""The thread that owns an engine: it steps while there is work and takes commands between two steps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rlcore.errors import DeadlineExceeded, UserError
from rlcore.interfaces import Engine
from rlcore.types import OnPublish, Request, Trajectory, WeightManifest
from rlcore.weights.manifest import verify_checksums

if TYPE_CHECKING:
    import torch

_IDLE_TURN_S = 0.1  # an idle thread still turns, so that its heartbeat tells it from a hung one
_REFUSED = (ValueError, KeyError, UserError)  # a bad command: the caller hears of it, the engine goes on


class DrainingEngine(Engine, Protocol):
    """An engine that can let started requests finish while it holds back the rest."""

    def begin_drain(self) -> None: ...

    def end_drain(self) -> None: ...

    def drained(self) -> bool: ...

    def running(self) -> int: ...

    def tokens_in_step(self) -> int: ...

    def stamp(self, version: int) -> None: ...


@dataclass(slots=True)
class _Update:
    """A weight update on its way; `deadline` bounds the drain of on_publish=finish (monotonic seconds)."""

    version: int
    tensors: Mapping[str, torch.Tensor]
    on_publish: OnPublish
    manifest: WeightManifest | None
    timeout_s: float
    future: Future[dict[str, float]]
    begun: float = 0.0


@dataclass(slots=True)
class _Call:
    run: Callable[[], Any]
    future: Future[Any]


@dataclass(slots=True)
class Counters:
    """Written by the engine thread alone, read by anyone. Times in seconds since the start of the worker."""

    steps: int = 0
    tokens: int = 0
    submitted: int = 0
    finished: int = 0
    running: int = 0
    waiting: int = 0
    version: int = 0
    updates: int = 0
    busy_s: float = 0.0  # inside engine steps
    update_stop_s: float = 0.0  # stopped for loading and verifying weights
    drain_s: float = 0.0  # draining before an update: old requests still decode, new ones wait
    heartbeat: float = field(default_factory=time.monotonic)  # last turn of the thread, idle ones included
    last_step: float = field(default_factory=time.monotonic)


class RolloutWorker:
    """Streams finished trajectories of one engine. All methods may be called from any thread and return at once."""

    def __init__(
        self,
        engine: DrainingEngine,
        on_finished: Callable[[list[Trajectory]], None],
        flush_interval_s: float = 0.05,
    ) -> None:
        """`on_finished` is called in the engine thread, at most every `flush_interval_s` while there is work."""
        self._engine = engine
        self._on_finished = on_finished
        self._flush_interval_s = flush_interval_s
        self._commands: deque[_Call | _Update] = deque()
        self._wake = threading.Condition()
        self._stop = False
        self._update: _Update | None = None  # draining
        self._finished: list[Trajectory] = []
        self._last_flush = time.monotonic()
        self._error: BaseException | None = None
        self.counters = Counters(version=engine.version)
        self._thread = threading.Thread(target=self._main, name="rollout-engine", daemon=True)
        self._thread.start()

    # -- called from outside -----------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> Future[None]:
        """Queue requests: all enter the engine between the same two steps, in order, or none does (ValueError)."""
        batch = list(requests)

        def run() -> None:
            self._engine.add(batch)
            self.counters.submitted += len(batch)

        return self._call(run)

    def abort(self, request_ids: Iterable[str]) -> Future[None]:
        """Drop requests; unknown ids are ignored."""
        ids = list(request_ids)
        return self._call(lambda: self._engine.abort(ids))

    def checksums(self, names: Iterable[str]) -> Future[dict[str, int]]:
        """Checksums of the weights as the engine holds them."""
        wanted = list(names)
        return self._call(lambda: self._engine.checksums(wanted))

    def update_weights(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        on_publish: OnPublish,
        *,
        manifest: WeightManifest | None = None,
        timeout_s: float = 300.0,
    ) -> Future[dict[str, float]]:
        """Load weights as `version`; the result is {"stop_s", "drain_s"}. Trajectories finished before come first.

        With `manifest` the engine's checksums are compared with the learner's: an ArrivalError is fatal, since such an
        engine must not serve. With on_publish=finish, DeadlineExceeded after `timeout_s` of draining: the engine then
        goes on with its old weights.
        """
        future: Future[dict[str, float]] = Future()
        return self._put(_Update(version, tensors, on_publish, manifest, timeout_s, future))

    def stamp(self, version: int) -> Future[None]:
        """Have tokens carry `version` from the next step on; the weights stay (a frozen draft)."""

        def run() -> None:
            self._engine.stamp(version)
            self.counters.version = version

        return self._call(run)

    def status(self) -> dict[str, Any]:
        """Counters, ages of heartbeat and last step (seconds), and the error that ended the thread, if any."""
        now, c = time.monotonic(), self.counters
        numbers = {name: getattr(c, name) for name in Counters.__slots__}
        numbers["heartbeat_age_s"] = now - numbers.pop("heartbeat")
        numbers["step_age_s"] = now - numbers.pop("last_step")
        numbers["queued_commands"] = len(self._commands)
        numbers["draining"] = self._update is not None
        numbers["error"] = None if self._error is None else _describe(self._error)
        return numbers

    def close(self, timeout_s: float = 30.0) -> None:
        """End the thread after the current step and hand over what is finished. Unfinished requests are lost.

        The engine stays the caller's to close. Raises DeadlineExceeded if the step does not end in time.
        """
        with self._wake:
            self._stop = True
            self._wake.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the engine thread did not end its step within {timeout_s:g} s of close()")

    def _call(self, run: Callable[[], Any]) -> Future[Any]:
        return self._put(_Call(run, Future()))

    def _put(self, command: _Call | _Update) -> Future[Any]:
        with self._wake:
            if self._error is not None:
                raise RuntimeError(f"the rollout engine has failed: {_describe(self._error)}") from self._error
            if self._stop:
                raise RuntimeError("the rollout worker is closed")
            self._commands.append(command)
            self._wake.notify()
        return command.future

    # -- the engine thread -------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._stop:
                self._turn()
            self._flush()
            self._fail_pending(RuntimeError("the rollout worker is closed"))
        except BaseException as e:  # kept and reported by every later call: the process is expected to die
            with self._wake:
                self._error = e
            self._fail_pending(e)

    def _turn(self) -> None:
        self._take_commands()
        c = self.counters
        if self._engine.unfinished() and not self._engine.drained():
            begun = time.monotonic()
            self._finished += self._engine.step()
            c.last_step = time.monotonic()
            c.busy_s += c.last_step - begun
            c.steps += 1
            c.tokens += self._engine.tokens_in_step()
        self._advance_drain()
        unfinished = self._engine.unfinished()
        c.running = self._engine.running()
        c.waiting = unfinished - c.running
        c.heartbeat = time.monotonic()
        if not unfinished or c.heartbeat - self._last_flush >= self._flush_interval_s:
            self._flush()
        if not unfinished:
            with self._wake:
                if not self._commands and not self._stop and self._update is None:
                    self._wake.wait(_IDLE_TURN_S)

    def _take_commands(self) -> None:
        while self._commands:
            command = self._commands[0]
            if isinstance(command, _Update) and self._update is not None:
                return  # one update at a time; what was queued behind it keeps its order
            self._commands.popleft()
            if isinstance(command, _Update):
                self._begin_update(command)
            else:
                _settle(command.future, command.run)

    def _begin_update(self, update: _Update) -> None:
        update.begun = time.monotonic()
        if update.on_publish == "finish":
            self._engine.begin_drain()
            self._update = update
            self._advance_drain()
        else:
            self._apply(update)

    def _advance_drain(self) -> None:
        update = self._update
        if update is None:
            return
        waited = time.monotonic() - update.begun
        if self._engine.drained():
            self._update = None
            self.counters.drain_s += waited
            self._apply(update)
        elif waited > update.timeout_s:
            self._update = None
            self._engine.end_drain()
            update.future.set_exception(
                DeadlineExceeded(
                    f"waited {waited:.1f} s for running requests to finish before version {update.version} "
                    f"(schedule.on_publish=finish, schedule.publish_timeout_s)"
                )
            )

    def _apply(self, update: _Update) -> None:
        self._flush()
        begun = time.monotonic()

        def run() -> dict[str, float]:
            try:
                self._engine.update_weights(update.version, update.tensors, update.on_publish)
            finally:
                self._engine.end_drain()  # also after a refused set: the old weights serve on
            if update.manifest is not None:
                verify_checksums(update.manifest, self._engine.checksums(update.manifest.checksums))
            stop_s = time.monotonic() - begun
            self.counters.update_stop_s += stop_s
            self.counters.updates += 1
            self.counters.version = update.version
            return {"stop_s": stop_s, "drain_s": begun - update.begun}

        _settle(update.future, run)

    def _flush(self) -> None:
        self._last_flush = time.monotonic()
        if self._finished:
            batch, self._finished = self._finished, []
            self.counters.finished += len(batch)
            self._on_finished(batch)

    def _fail_pending(self, error: BaseException) -> None:
        with self._wake:
            pending: list[_Call | _Update] = [*([self._update] if self._update else []), *self._commands]
            self._commands.clear()
            self._update = None
        for command in pending:
            if not command.future.done():
                command.future.set_exception(RuntimeError(f"the rollout engine has stopped: {_describe(error)}"))


def _settle(future: Future[Any], run: Callable[[], Any]) -> None:
    """Run a command and settle its future. What is not a refused command ends the thread too."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(run())
    except _REFUSED as e:
        future.set_exception(e)
    except BaseException as e:
        future.set_exception(e)
        raise


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
