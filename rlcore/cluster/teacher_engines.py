"""A teacher's engines: their processes, the driver's watch over them, and the client by which
rollout actors have records scored."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from rlcore.cluster.calls import DEAD, kill
from rlcore.cluster.placement import actor_class, bound_to
from rlcore.errors import RoleLost
from rlcore.interfaces import GivenTokens, TeacherAnswer
from rlcore.launch.specs import ACTOR_RESOURCE
from rlcore.loop.specs import SILENT_S
from rlcore.types import TEACHER, TEACHER_S, Trajectory

if TYPE_CHECKING:
    from rlcore.cluster.specs import Hosting
    from rlcore.loop.specs import SupervisionSpec
    from rlcore.rollout.specs import EngineJob

CHUNK = 32  # records of a call
THREADS = {"watch": 1}  # beside the one that computes


@dataclass(frozen=True, slots=True)
class TeacherState:
    """An engine as its process reports it."""

    pid: int
    ready: bool = False  # its model is loaded
    busy_s: float = 0.0  # of the call under way, or of the engine's start
    error: str = ""  # that ended the engine


class TeacherActor:
    """One engine. Ray restarts the process, whose first call then starts the engine again."""

    def __init__(self, job: EngineJob) -> None:
        self._job = job
        self._engine: Any = None
        self._since: float | None = None  # when the call under way began, or its part after a start
        self._error = ""
        self._given_up: dict[str, int] = {}  # the last call that nobody waits for, by caller

    def start(self) -> int:
        if self._engine is None:
            from rlcore.rollout.specs import start_teacher

            self._engine = start_teacher(self._job)
        return os.getpid()

    def score(
        self, given: Sequence[GivenTokens], caller: str, number: int
    ) -> tuple[list[TeacherAnswer | None], float]:
        """Scores by record, None for one that the engine refuses, and the seconds that all took.
        `number`: of the caller's calls, which are computed only while it waits for them."""
        if number <= self._given_up.get(caller, 0):
            return [], 0.0
        self._since = time.monotonic()
        try:
            self.start()
            self._since = start = time.monotonic()
            answers = self._engine.score(given)
        except Exception as e:  # any error of the engine: the driver has the process replaced
            self._error = f"{type(e).__name__}: {e}"
            raise
        finally:
            self._since = None
        return answers, time.monotonic() - start

    @ray.method(concurrency_group="watch")
    def give_up(self, caller: str, number: int) -> None:
        """Compute none of a caller's calls up to `number`. In place of `ray.cancel`, which has the
        node connect to the process. Where that is stopped, the node then fails to end it, and a
        restarted process would wait 30 s for each call that was cancelled."""
        self._given_up[caller] = number

    @ray.method(concurrency_group="watch")
    def state(self) -> TeacherState:
        since = self._since
        busy = 0.0 if since is None else time.monotonic() - since
        return TeacherState(os.getpid(), self._engine is not None, busy, self._error)


@dataclass(slots=True)
class _Watched:
    """An engine, and the heartbeat that it was asked for last."""

    handle: Any
    asked: Any = None
    since: float = 0.0
    pid: int = 0
    told: bool = False  # its silence was
    answers: bool = False  # its process has answered; not yet while one starts or is replaced


class RayTeacher:
    """The engines as the driver has them."""

    def __init__(
        self,
        handles: Sequence[Any],
        started: Sequence[Any],
        supervision: SupervisionSpec,
        note: Callable[[str], None],
    ) -> None:
        """`started`: their answers to `start`."""
        self.handles = tuple(handles)
        self.starting = [(ref, f"teacher engine {i} to start") for i, ref in enumerate(started)]
        self._spec = supervision
        self._note = note
        self._watched = [_Watched(handle) for handle in handles]

    def watch(self) -> None:
        """Have an engine replaced that failed, hangs or does not answer; waits for none. Raises
        RoleLost for one that died more often than cluster.max_restarts allows."""
        for i, engine in enumerate(self._watched):
            fault = self._fault(engine, i)
            if fault:
                self._note(f"the teacher's engine {i} {fault}: it is replaced")
                engine.asked, engine.answers = None, False
                kill(engine.handle, no_restart=False)

    def _fault(self, engine: _Watched, number: int) -> str:
        """Return what is wrong with an engine, as far as it is known; "" for nothing."""
        now = time.monotonic()
        if engine.asked is None:
            engine.asked, engine.since = engine.handle.state.remote(), now
        if not ray.wait([engine.asked], timeout=0)[0]:
            # a process takes its time to end and to start, however short the deadline for answers
            key = "hang_timeout_s" if engine.answers else "start_timeout_s"
            silent_s, limit = now - engine.since, getattr(self._spec, key)
            late = silent_s > limit
            if engine.answers and silent_s > SILENT_S and not late and not engine.told:
                self._note(f"the teacher's engine {number} has not answered for {silent_s:.0f} s")
                engine.told = True
            return f"did not answer for cluster.{key}={limit:g} s" if late else ""
        asked, engine.asked, engine.told = engine.asked, None, False
        try:
            state: TeacherState = ray.get(asked)
        except DEAD as e:
            raise RoleLost(
                f"the teacher's engine {number} died more often than cluster.max_restarts="
                f"{self._spec.max_restarts} allows"
            ) from e
        if engine.pid not in (0, state.pid):
            self._note(f"the teacher's engine {number} died, and another process has replaced it")
        engine.pid, engine.answers = state.pid, True
        if state.error:
            return f"failed ({state.error})"
        key = "hang_timeout_s" if state.ready else "start_timeout_s"
        allowed = getattr(self._spec, key)
        return f"has computed for cluster.{key}={allowed:g} s" if state.busy_s > allowed else ""

    def kill(self) -> None:
        """End the processes for good."""
        for handle in self.handles:
            kill(handle)


@dataclass(slots=True)
class TeacherOutlet:
    """Has records scored on their way to the buffer. One thread calls it.

    Records that no engine has scored by the deadline go on without a teacher, and so do those whose
    engine fails, or dies twice under them. A record of which a log-prob is not a number has no
    teacher either: one NaN would be the loss of a whole step.
    """

    handles: Sequence[Any]
    timeout_s: float  # of what is handed over at once, the wait for the engines included
    _caller: str = field(default="", init=False)  # this copy's name, which its process gives it
    _calls: int = field(default=0, init=False)

    def __call__(self, records: Sequence[Trajectory]) -> None:
        """Add a teacher's scores to the records' extras, in place."""
        end = time.monotonic() + self.timeout_s
        self._caller = self._caller or uuid.uuid4().hex
        calls = []
        for chunk in _chunks([t for t in records if len(t.logp_inf)]):
            handle = self.handles[self._calls % len(self.handles)]
            self._calls += 1
            given = [(t.token_ids, t.sampled) for t in chunk]
            calls.append((chunk, handle, handle.score.remote(given, self._caller, self._calls)))
        late = []
        for chunk, handle, ref in calls:
            try:
                answers, seconds = ray.get(ref, timeout=max(0.0, end - time.monotonic()))
            except GetTimeoutError:
                late.append(handle)
                continue
            except RayError:  # failed or dead: the driver's watch has engines replaced
                continue
            for record, answer in zip(chunk, answers):
                if answer is not None and _numbers(answer):
                    record.timings[TEACHER_S] = seconds / len(chunk)
                    record.extras |= dict(zip(TEACHER, answer))
        for handle in dict.fromkeys(late):
            handle.give_up.remote(self._caller, self._calls)


def _numbers(answer: TeacherAnswer) -> bool:
    """-inf is one: a likeliest token beyond those that can be sampled."""
    _, logp_at, logp = answer
    return bool(np.isfinite(logp).all() and not np.isnan(logp_at).any())


def _chunks(records: Sequence[Trajectory]) -> Iterator[Sequence[Trajectory]]:
    for start in range(0, len(records), CHUNK):
        yield records[start : start + CHUNK]


def start_engines(hosting: Hosting, job: EngineJob, note: Callable[[str], None]) -> RayTeacher:
    """The engines of a teacher. Ray restarts each under the same handle, and repeats once a call
    that it did not answer, so that a record which ends two processes is scored by none."""
    spec = job.actor
    actor = actor_class(
        TeacherActor,
        num_cpus=spec.num_cpus,
        num_gpus=spec.num_gpus * spec.tensor_parallel,
        resources=bound_to(ACTOR_RESOURCE, own_nodes=hosting.own_nodes),
        max_restarts=hosting.supervision.max_restarts,
        max_task_retries=1,
        concurrency_groups=THREADS,
    )
    handles = [actor.remote(replace(job, actor_id=f"teacher-{i}")) for i in range(spec.count)]
    started = [handle.start.remote() for handle in handles]
    return RayTeacher(handles, started, hosting.supervision, note)
