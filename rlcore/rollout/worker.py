"""The thread that owns an engine: it steps while there is work and takes commands between steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from rlcore.errors import DeadlineExceeded
from rlcore.interfaces import RolloutEngine, Wake, WeightStream
from rlcore.rollout.commands import Call, CommandQueue, Update, describe, settle
from rlcore.rollout.counters import Counters
from rlcore.rollout.step_costs import StepCosts
from rlcore.rollout.updates import Updates
from rlcore.types import OnPublish, Request, Trajectory, WeightManifest

# an idle thread still loops, so that its heartbeat differs from that of a hung one
_IDLE_TURN_S = 0.1


class RolloutWorker:
    """Streams the finished trajectories of one engine.

    All methods may be called from any thread and return at once.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        on_finished: Callable[[list[Trajectory]], None],
        flush_interval_s: float = 0.05,
    ) -> None:
        """`on_finished` is called in the engine thread, at most every `flush_interval_s` while
        there is work."""
        self._engine = engine
        self._on_finished = on_finished
        self._flush_interval_s = flush_interval_s
        self._commands = CommandQueue()
        self._finished: list[Trajectory] = []
        self._last_flush = time.monotonic()
        self._costs = StepCosts()
        self._beside_s = 0.0  # since the last step: taking requests, handing over answers
        self._error: BaseException | None = None
        self._asleep = False  # from `sleep` to `wake("all")`: nothing is decoded
        self.counters = Counters(version=engine.version)
        # Trajectories that finished under the old weights are delivered before the new ones serve.
        self._updates = Updates(engine, self.counters, before_load=self._flush)
        self._thread = threading.Thread(target=self._main, name="rollout-engine", daemon=True)
        self._thread.start()

    # -- called by any thread ----------------------------------------------------------------------

    def submit(self, requests: Sequence[Request], begun: Sequence[Trajectory] = ()) -> Future[None]:
        """Queue requests: all enter the engine between the same two steps, in order, or none does
        (ValueError). `begun`: what `cut` of another worker gave of them."""
        batch = list(requests)

        def run() -> None:
            self._engine.add(batch, begun)
            self.counters.submitted += len(batch)

        return self._commands.put(Call(run))

    def abort(self, request_ids: Iterable[str]) -> Future[None]:
        """Drop requests; unknown ids are ignored."""
        ids = list(request_ids)
        return self._commands.put(Call(lambda: self._engine.abort(ids)))

    def cut(self, request_ids: Iterable[str]) -> Future[list[Trajectory]]:
        """Drop requests and return what they have so far; those that have finished are not among
        them, and are delivered."""
        ids = list(request_ids)
        return self._commands.put(Call(lambda: self._engine.cut(ids)))

    def checksums(self, names: Iterable[str]) -> Future[dict[str, int]]:
        """Checksums of the weights as the engine holds them."""
        wanted = list(names)
        return self._commands.put(Call(lambda: self._engine.checksums(wanted)))

    def update_weights(
        self,
        version: int,
        weights: WeightStream,
        on_publish: OnPublish,
        *,
        timeout_s: float,
        manifest: WeightManifest | None = None,
    ) -> Future[dict[str, float]]:
        """Load weights as `version`; the result is {"stop_s", "drain_s"}.

        Trajectories finished before are delivered first. With `manifest` the engine's checksums are
        compared with the learner's: an ArrivalError is fatal, since such an engine must not serve.
        With on_publish=finish, DeadlineExceeded after `timeout_s` of draining: the engine then
        continues with the old weights."""
        return self._commands.put(Update(version, weights, on_publish, manifest, timeout_s))

    def set_version(self, version: int) -> Future[None]:
        """Have tokens carry `version` from the next step on; the weights stay (a frozen draft)."""

        def run() -> None:
            self._engine.set_version(version)
            self.counters.version = version

        return self._commands.put(Call(run))

    def sleep(self) -> Future[float]:
        """Hand over what is finished, free the engine's memory (bytes) and decode nothing until it
        is awake again."""

        def run() -> float:
            self._asleep = True
            freed = self._engine.sleep()
            self._flush()
            return freed

        return self._commands.put(Call(run))

    def wake(self, what: Wake) -> Future[None]:
        """Take the engine's memory back: for the "weights", so that they can be updated, then for
        "all", with which it goes on."""

        def run() -> None:
            self._engine.wake(what)
            self._asleep = what != "all"

        return self._commands.put(Call(run))

    def status(self) -> dict[str, Any]:
        """Counters, ages of heartbeat and last step (seconds), what a step costs (`StepCosts`), and
        the error that ended the thread, if any."""
        c = self.counters
        times = ("heartbeat", "last_step", "loading_until")  # monotonic: meaningless elsewhere
        return {
            **{name: getattr(c, name) for name in Counters.__slots__ if name not in times},
            "heartbeat_age_s": c.heartbeat_age_s(),
            "step_age_s": time.monotonic() - c.last_step,
            "queued_commands": len(self._commands),
            "costs": self._costs.fitted(),
            "draining": self._updates.draining,
            "loading": c.loading_until > 0,
            "asleep": self._asleep,
            "error": None if self._error is None else describe(self._error),
        }

    def close(self, timeout_s: float = 30.0) -> None:
        """End the thread after the current step and deliver what is finished. Unfinished requests
        are lost.

        The caller closes the engine. Raises DeadlineExceeded if the step does not end in time.
        """
        self._commands.close()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(
                f"the engine thread did not end its step within {timeout_s:g} s of close()"
            )

    # -- the engine thread -------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._commands.closing:
                self._turn()
            self._flush()
            error: BaseException | None = None
        # Any error is reported by every later call, and the process is expected to exit.
        except BaseException as e:
            error = self._error = e
        self._commands.end(error)
        self._updates.end(error or RuntimeError("the rollout worker is closed"))

    def _turn(self) -> None:
        self._take_commands()
        self._step()
        self._updates.advance()
        c = self.counters
        unfinished = self._engine.unfinished()
        c.running = self._engine.running()
        c.waiting = unfinished - c.running
        c.heartbeat = time.monotonic()
        if not unfinished or c.heartbeat - self._last_flush >= self._flush_interval_s:
            self._flush()
        if (self._asleep or not unfinished) and not self._updates.draining:
            self._commands.wait(_IDLE_TURN_S)

    def _take_commands(self) -> None:
        # One update at a time; later commands keep their order.
        while (command := self._commands.take(updates=not self._updates.draining)) is not None:
            if isinstance(command, Update):
                self._updates.begin(command)
            else:
                begun = time.monotonic()
                settle(command.future, command.run)
                self._beside_s += time.monotonic() - begun

    def _step(self) -> None:
        if self._asleep or not self._engine.unfinished() or self._engine.drained():
            return
        c = self.counters
        begun = time.monotonic()
        self._finished += self._engine.step()
        c.last_step = time.monotonic()
        c.busy_s += c.last_step - begun
        c.steps += 1
        load = self._engine.load_of_step()
        c.tokens += load.tokens
        self._costs.add(load, c.last_step - begun + self._beside_s)
        self._beside_s = 0.0

    def _flush(self) -> None:
        self._last_flush = time.monotonic()
        self.counters.decoding_s = self._engine.decoding_s()
        if self._finished:
            batch, self._finished = self._finished, []
            self.counters.finished += len(batch)
            self._on_finished(batch)
            self._beside_s += time.monotonic() - self._last_flush
