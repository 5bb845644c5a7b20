"""Grading off the controller: trajectories in, scored trajectories out, a deadline on every one.

One thread looks after each grading process. What goes wrong with a grader becomes the status of the sample it happened
to, never a reward: it raised, or returned no finite number ("error"); it passed its deadline ("timeout", by an alarm in
the process, or by killing a process that ignores it); its process died (once more alone in a fresh one, then "error").
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.errors import DeadlineExceeded, StageError
from rlcore.tasks import make_task, parse_prompt_id
from rlcore.tasks.grading_process import GradingProcess, WorkerDied
from rlcore.types import Grade, Trajectory

MAX_CHUNK = 32  # trajectories handed to a process at once
HAND_OVER_S = 0.25  # finished ones of a slow chunk are not held back longer than this
KILL_GRACE_S = 1.0  # how long past its deadline a grader may ignore the alarm
MAX_DEATHS = 2
CLOSE_S = 20.0


@dataclass(slots=True)
class _Entry:
    trajectory: Trajectory
    deaths: int = 0  # processes that ended while they graded it


class Scorer:
    """Scores trajectories in `processes` grading processes, started at once and replaced when they die.

    tasks: label -> (task name, task args), where a trajectory's prompt_id begins with the label. Built here once too,
    so that a wrong argument is a UserError before anything starts.
    decode: token ids -> text, called under a lock; the text is cut before the first of the `stop` strings in it.
    timeout_s: seconds one grading may take. memory_mib: address space of a grading process.
    on_scored: called from the scorer's threads, one at a time, with trajectories in the order of completion. An
    exception of `decode` or `on_scored`, or a grading process that does not start, ends the scorer: `submit`, `drain`
    and `close` then raise StageError.
    """

    def __init__(
        self,
        tasks: Mapping[str, tuple[str, Mapping[str, Any]]],
        decode: Callable[[Sequence[int]], str],
        *,
        processes: int,
        timeout_s: float,
        on_scored: Callable[[list[Trajectory]], None],
        stop: Sequence[str] = (),
        start_timeout_s: float = 120.0,
        memory_mib: int = 4096,
    ) -> None:
        for label, (name, args) in tasks.items():
            make_task(name, args, label=label)
        self._tasks = {label: (name, dict(args)) for label, (name, args) in tasks.items()}
        self._decode, self._stop, self._on_scored = decode, tuple(stop), on_scored
        self._timeout_s, self._start_timeout_s, self._memory_mib = timeout_s, start_timeout_s, memory_mib
        self.scored = 0  # trajectories with a reward
        self.errors = 0
        self.timeouts = 0
        self._pending: deque[_Entry] = deque()
        self._unfinished = 0  # submitted and not yet handed over
        self._state = threading.Condition()
        self._decoding, self._handing_over = threading.Lock(), threading.Lock()
        self._workers: dict[int, GradingProcess] = {}
        self._failure: BaseException | None = None
        self._closing = False
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), name=f"scorer-{i}", daemon=True) for i in range(processes)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def unfinished(self) -> int:
        """Trajectories submitted and not yet handed to `on_scored`."""
        return self._unfinished

    def submit(self, trajectories: Sequence[Trajectory]) -> None:
        """Queue trajectories. Returns at once. Raises ValueError for a prompt id of no known task."""
        for trajectory in trajectories:
            label, _, _ = parse_prompt_id(trajectory.prompt_id)
            if label not in self._tasks:
                raise ValueError(f"{trajectory.prompt_id}: no task is labelled {label!r}; there is {list(self._tasks)}")
        with self._state:
            self.check()
            if self._closing:
                raise StageError("trajectories were submitted to a scorer that is closed")
            self._pending.extend(_Entry(trajectory) for trajectory in trajectories)
            self._unfinished += len(trajectories)
            self._state.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Wait until everything submitted has been handed over. Raises DeadlineExceeded."""
        with self._state:
            if not self._state.wait_for(lambda: self._failure is not None or not self._unfinished, timeout_s):
                raise DeadlineExceeded(f"{self._unfinished} trajectories were not graded within {timeout_s:g} s")
            self.check()

    def close(self) -> None:
        """Stop at once: kill the grading processes; what was not graded is dropped."""
        with self._state:
            self._closing = True
            self._state.notify_all()
            workers = list(self._workers.values())
        for worker in workers:
            worker.kill()
        for thread in self._threads:
            thread.join(CLOSE_S)
            if thread.is_alive():
                raise DeadlineExceeded(f"{thread.name} did not end within {CLOSE_S:g} s of closing the scorer")
        self.check()

    def check(self) -> None:
        """Raise StageError if the scorer has failed for good."""
        if self._failure is not None:
            raise StageError(f"scoring failed: {self._failure}") from self._failure

    def _serve(self, slot: int) -> None:
        try:
            while not self._closing:
                worker = self._worker(slot)
                chunk = self._next_chunk()
                if chunk:
                    self._grade(self._worker(slot) if not worker.alive else worker, chunk)
        except Exception as error:
            with self._state:
                if not self._closing:
                    self._failure = error
                self._closing = True
                self._state.notify_all()
        finally:
            with self._state:
                last = self._workers.pop(slot, None)
            if last is not None:
                last.close()

    def _worker(self, slot: int) -> GradingProcess:
        """The slot's process; a new one if there is none or it has ended."""
        worker = self._workers.get(slot)
        if worker is not None and worker.alive:
            return worker
        if worker is not None:
            worker.close()
        worker = GradingProcess(
            self._tasks,
            timeout_s=self._timeout_s,
            start_timeout_s=self._start_timeout_s,
            memory_mib=self._memory_mib,
        )
        with self._state:
            self._workers[slot] = worker
        return worker

    def _next_chunk(self) -> list[_Entry]:
        """This process's share of what waits; one that a process died on goes alone. Empty when closing."""
        with self._state:
            self._state.wait_for(lambda: self._closing or self._pending)
            if self._closing:
                return []
            count = min(MAX_CHUNK, -(-len(self._pending) // len(self._threads)))
            chunk = [self._pending.popleft()]
            while len(chunk) < count and not chunk[0].deaths and not self._pending[0].deaths:
                chunk.append(self._pending.popleft())
            return chunk

    def _grade(self, worker: GradingProcess, chunk: list[_Entry]) -> None:
        done: list[Trajectory] = []
        handed_over = started = time.monotonic()
        finished = 0
        try:
            worker.ask([(e.trajectory.prompt_id, self._text(e.trajectory)) for e in chunk], self._timeout_s)
            for entry in chunk:
                started = time.monotonic()
                if started - handed_over > HAND_OVER_S or not worker.ready(HAND_OVER_S):
                    self._hand_over(done)
                    done, handed_over = [], time.monotonic()
                verdict = worker.receive(started + self._timeout_s + KILL_GRACE_S - time.monotonic())
                done.append(self._apply(entry.trajectory, verdict))
                finished += 1
        except DeadlineExceeded:
            worker.kill()
            late = {"status": "timeout", "seconds": time.monotonic() - started}
            done.append(self._apply(chunk[finished].trajectory, late))
            self._return(chunk[finished + 1 :])
        except WorkerDied as death:
            culprit = chunk[finished]
            culprit.deaths += 1
            if culprit.deaths >= MAX_DEATHS:
                fault = {"status": "error", "error": str(death), "seconds": time.monotonic() - started}
                done.append(self._apply(culprit.trajectory, fault))
                self._return(chunk[finished + 1 :])
            else:
                self._return(chunk[finished:])
        self._hand_over(done)

    def _text(self, trajectory: Trajectory) -> str:
        with self._decoding:
            text = self._decode(trajectory.response_ids.tolist())
        ends = [at for at in map(text.find, self._stop) if at >= 0]
        return text[: min(ends)] if ends else text

    def _apply(self, trajectory: Trajectory, verdict: Mapping[str, Any]) -> Trajectory:
        seconds = verdict["seconds"]
        if verdict["status"] == "ok":
            return trajectory.scored("ok", Grade(verdict["reward"], verdict["parts"]), seconds=seconds)
        if verdict["status"] == "timeout":
            why = f"the grader passed its deadline of {self._timeout_s:g} s"
            return trajectory.scored("timeout", error=why, seconds=seconds)
        return trajectory.scored("error", error=verdict["error"], seconds=seconds)

    def _return(self, entries: list[_Entry]) -> None:
        with self._state:
            self._pending.extendleft(reversed(entries))
            self._state.notify_all()

    def _hand_over(self, done: list[Trajectory]) -> None:
        if not done or self._closing:
            return
        with self._handing_over:
            self._on_scored(done)
        with self._state:
            self.scored += sum(t.score_status == "ok" for t in done)
            self.errors += sum(t.score_status == "error" for t in done)
            self.timeouts += sum(t.score_status == "timeout" for t in done)
            self._unfinished -= len(done)
            self._state.notify_all()
