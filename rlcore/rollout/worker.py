"""The thread that owns an engine: it steps while there is work and takes commands between steps."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rlcore.errors import DeadlineExceeded, UserError
from rlcore.interfaces import RolloutEngine, Wake, WeightStream
from rlcore.rollout.step_costs import StepCosts
from rlcore.types import OnPublish, Request, Trajectory, WeightManifest
from rlcore.weights.manifest import verify_checksums

# Finished work is handed over at most this often while there is more. A message costs each of its
# receivers about a millisecond; but the next turn of an episode waits for the one before.
HAND_OVER_S = 0.2
HAND_OVER_TURNS_S = 0.05


@dataclass(slots=True)
class Counters:
    """Written only by the engine thread, read by any thread. Seconds and counts since the start."""

    steps: int = 0
    tokens: int = 0
    proposed: int = 0  # tokens, by another model (`ActorSpec.speculate`)
    accepted: int = 0  # of these
    submitted: int = 0
    finished: int = 0
    running: int = 0
    waiting: int = 0
    version: int = 0
    updates: int = 0
    busy_s: float = 0.0  # inside engine steps
    drain_s: float = 0.0  # draining before an update: old requests still decode, new ones wait
    # request id -> seconds it has decoded, of those that have a token; replaced, never changed
    decoding_s: dict[str, float] = field(default_factory=dict)
    # monotonic times: last turn of the thread, idle ones included, and last engine step
    heartbeat: float = field(default_factory=time.monotonic)
    last_step: float = field(default_factory=time.monotonic)
    loading_until: float = 0.0  # deadline of the weights being loaded; 0: none are

    def heartbeat_age_s(self) -> float:
        """Seconds since the thread last turned; while it loads weights, since their deadline.

        A large set takes longer than a process may be silent, and has its own deadline.
        """
        return max(0.0, time.monotonic() - max(self.heartbeat, self.loading_until))


# Errors that only the caller receives; the engine continues.
_REFUSED = (ValueError, KeyError, UserError)


@dataclass(slots=True)
class EngineCall:
    """A function to run between two steps."""

    run: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)


@dataclass(slots=True)
class WeightUpdate:
    """A set of weights to load. Its result is {"stop_s", "drain_s"}."""

    version: int
    weights: WeightStream
    on_publish: OnPublish
    manifest: WeightManifest | None
    timeout_s: float  # of the publication: bounds the drain of on_publish=finish
    future: Future[dict[str, float]] = field(default_factory=Future)
    begun: float = 0.0  # monotonic seconds


class CommandQueue:
    """Commands in order. Any thread puts, one takes; after `end` nothing is accepted."""

    def __init__(self) -> None:
        self._commands: deque[EngineCall | WeightUpdate] = deque()
        self._changed = threading.Condition()
        self._ended: BaseException | None = None
        self.closing = False  # the owner takes no further commands

    def __len__(self) -> int:
        return len(self._commands)

    def put(self, command: EngineCall | WeightUpdate) -> Future[Any]:
        """Queue a command. Raises RuntimeError if the queue has ended or is closing."""
        with self._changed:
            if self._ended is not None:
                raise RuntimeError(
                    f"the rollout engine has failed: {describe(self._ended)}"
                ) from self._ended
            if self.closing:
                raise RuntimeError("the rollout worker is closed")
            self._commands.append(command)
            self._changed.notify()
        return command.future

    def take(self, *, updates: bool) -> EngineCall | WeightUpdate | None:
        """The next command, None if there is none or if it is an update and updates must wait."""
        if not self._commands or (isinstance(self._commands[0], WeightUpdate) and not updates):
            return None
        return self._commands.popleft()

    def wait(self, timeout_s: float) -> None:
        """Return when a command waits, when the queue closes, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._commands and not self.closing:
                if not self._changed.wait(deadline - time.monotonic()):
                    return

    def close(self) -> None:
        """Accept no further commands."""
        with self._changed:
            self.closing = True
            self._changed.notify()

    def end(self, error: BaseException | None) -> None:
        """Fail what is queued; `error`, if any, is raised by every later `put`."""
        with self._changed:
            self._ended = error
            pending = list(self._commands)
            self._commands.clear()
        for command in pending:
            fail(command.future, error or RuntimeError("the rollout worker is closed"))


def settle(future: Future[Any], run: Callable[[], Any]) -> None:
    """Run a command and settle its future. Errors other than refusals are raised here too."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(run())
    except _REFUSED as e:
        future.set_exception(e)
    except BaseException as e:
        future.set_exception(e)
        raise


def fail(future: Future[Any], error: BaseException) -> None:
    """Fail the future of a command that will not run."""
    if not future.done():
        future.set_exception(RuntimeError(f"the rollout engine has stopped: {describe(error)}"))


def describe(error: BaseException) -> str:
    """One line. Example: OSError: no space left"""
    return f"{type(error).__name__}: {error}"


class Updates:
    """Applies updates to the engine. `before_load` is called while the old weights still serve."""

    def __init__(
        self, engine: RolloutEngine, counters: Counters, before_load: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._counters = counters
        self._before_load = before_load
        self._draining: WeightUpdate | None = None

    @property
    def draining(self) -> bool:
        """True if an update waits for running requests to finish."""
        return self._draining is not None

    def begin(self, update: WeightUpdate) -> None:
        """Apply an update, at once or, with on_publish=finish, when running requests are done."""
        update.begun = time.monotonic()
        if update.on_publish == "finish":
            self._engine.begin_drain()
            self._draining = update
            self.advance()
        else:
            self._apply(update)

    def advance(self) -> None:
        """Apply the waiting update if the engine has drained; fail it after its timeout."""
        update = self._draining
        if update is None:
            return
        waited = time.monotonic() - update.begun
        if self._engine.drained():
            self._draining = None
            self._counters.drain_s += waited
            self._apply(update)
        elif waited > update.timeout_s:
            self._draining = None
            self._engine.end_drain()
            update.future.set_exception(
                DeadlineExceeded(
                    f"waited {waited:.1f} s for running requests to finish before version "
                    f"{update.version} (schedule.on_publish=finish, schedule.publish_timeout_s)"
                )
            )

    def _apply(self, update: WeightUpdate) -> None:
        self._before_load()
        self._counters.loading_until = time.monotonic() + update.timeout_s
        try:
            settle(update.future, lambda: self._load(update))
        finally:
            self._counters.loading_until = 0.0
            self._counters.heartbeat = time.monotonic()

    def _load(self, update: WeightUpdate) -> dict[str, float]:
        begun = time.monotonic()
        try:
            self._engine.update_weights(update.version, update.weights, update.on_publish)
        finally:
            self._engine.end_drain()  # also after a refused update: the old weights stay in use
        if update.manifest is not None:
            verify_checksums(update.manifest, self._engine.checksums(update.manifest.checksums))
        stop_s = time.monotonic() - begun
        self._counters.updates += 1
        self._counters.version = update.version
        return {"stop_s": stop_s, "drain_s": begun - update.begun}

    def end(self, error: BaseException) -> None:
        """Fail the pending update, if any."""
        if self._draining is not None:
            fail(self._draining.future, error)
            self._draining = None


# Of a step's fixed part: newer requests join older ones while all requests cost at most this share.
JOIN_COST = 0.25


class SpareTime:
    """Tells an engine with time to spare by the share of its time in which it has no requests.

    Newer requests then wait for older ones, and smaller steps are paid for with that time. Served
    as they come, the answers of two steps are whole at once, and the engine idles in every second
    step. The share shrinks by the waiting itself, so that it may end lower than it begins."""

    BEGINS, ENDS = 0.1, 0.05
    KEPT = 0.7  # of what was counted, with each version

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now`: a clock, in seconds."""
        self._now = now
        self._has = False
        self._idle_s = self._all_s = 0.0
        self._since = now()

    def add(self, seconds: float) -> None:
        """Seconds without requests, after the first."""
        self._idle_s += seconds

    def next_version(self) -> bool:
        """Begin another version; return whether there is time to spare."""
        now = self._now()
        self._all_s += now - self._since
        self._since = now
        self._has = self._idle_s > self._all_s * (self.ENDS if self._has else self.BEGINS)
        self._idle_s *= self.KEPT
        self._all_s *= self.KEPT
        return self._has


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
        *,
        turns: bool = False,
    ) -> None:
        """`on_finished` is called in the engine thread, at most every `flush_interval_s` while
        there is work. `turns`: requests are turns of episodes, of which a newer one may belong to
        an older group, so that none waits for another."""
        self._engine = engine
        self._on_finished = on_finished
        self._flush_interval_s = flush_interval_s
        self._commands = CommandQueue()
        self._finished: list[Trajectory] = []
        self._last_flush = time.monotonic()
        self._costs = StepCosts()
        self._turns = turns
        self._spare = SpareTime()
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
        (ValueError). `begun`: the records of these requests that `cut` of another worker
        returned."""
        batch = list(requests)

        def run() -> None:
            self._engine.add(batch, begun)
            self.counters.submitted += len(batch)

        return self._commands.put(EngineCall(run))

    def abort(self, request_ids: Iterable[str]) -> Future[None]:
        """Drop requests; unknown ids are ignored."""
        ids = list(request_ids)
        return self._commands.put(EngineCall(lambda: self._engine.abort(ids)))

    def cut(self, request_ids: Iterable[str]) -> Future[list[Trajectory]]:
        """Drop requests and return their records so far; finished requests are not among them, and
        are delivered."""
        ids = list(request_ids)
        return self._commands.put(EngineCall(lambda: self._engine.cut(ids)))

    def checksums(self, names: Iterable[str]) -> Future[dict[str, int]]:
        """Checksums of the weights as the engine holds them."""
        wanted = list(names)
        return self._commands.put(EngineCall(lambda: self._engine.checksums(wanted)))

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
        return self._commands.put(WeightUpdate(version, weights, on_publish, manifest, timeout_s))

    def set_version(self, version: int) -> Future[None]:
        """Have tokens carry `version` from the next step on; the weights stay (a frozen draft)."""

        def run() -> None:
            self._order()
            self._engine.set_version(version)
            self.counters.version = version

        return self._commands.put(EngineCall(run))

    def sleep(self) -> Future[float]:
        """Hand over what is finished, free the engine's memory (bytes) and decode nothing until it
        is awake again."""

        def run() -> float:
            self._asleep = True
            freed = self._engine.sleep()
            self._flush()
            return freed

        return self._commands.put(EngineCall(run))

    def wake(self, what: Wake) -> Future[None]:
        """Take the engine's memory back: for the "weights", so that they can be updated, then for
        "all", with which it goes on."""

        def run() -> None:
            self._engine.wake(what)
            self._asleep = what != "all"

        return self._commands.put(EngineCall(run))

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
            error = e
        self._commands.end(error)
        self._updates.end(error or RuntimeError("the rollout worker is closed"))
        self._error = error  # last: a call that is made after it was seen fails, too

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
            begun = time.monotonic()
            self._commands.wait(_IDLE_TURN_S)
            if c.steps and not self._asleep:
                self._spare.add(time.monotonic() - begun)

    def _take_commands(self) -> None:
        # One update at a time; later commands keep their order.
        while (command := self._commands.take(updates=not self._updates.draining)) is not None:
            if isinstance(command, WeightUpdate):
                self._order()
                self._updates.begin(command)
            else:
                begun = time.monotonic()
                settle(command.future, command.run)
                self._beside_s += time.monotonic() - begun

    def _order(self) -> None:
        """Before another version: say how many requests make newer ones wait until the next."""
        waits = self._spare.next_version() and not self._turns
        self._engine.hold_newer(self._costs.requests_at(JOIN_COST) if waits else math.inf)

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
        c.proposed += load.proposed
        c.accepted += load.accepted
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
