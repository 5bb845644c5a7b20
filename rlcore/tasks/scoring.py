"""Grading in separate processes, with a deadline for every answer.

One thread serves each grading process. A failure of a grader becomes the status of the sample that
it judged, never a reward. It is "error" if it raised, or returned no finite number. It is "timeout"
if it passed its deadline (by an alarm in the process, or by killing a process that ignores it). It
is "error" if its process died twice (the second time alone, in a fresh one).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcore.errors import DeadlineExceeded, StageError
from rlcore.tasks import make_task, parse_prompt_id
from rlcore.tasks.grading_process import GradingProcess, WorkerDied
from rlcore.tasks.grading_worker import MAX_ERROR
from rlcore.tasks.specs import EvalTaskSpec, GradingSpec
from rlcore.types import Answer, Score

MAX_CHUNK = 32  # answers sent to a process at once
HAND_OVER_S = 0.25  # finished scores are held back no longer than this, while there are more
KILL_GRACE_S = 1.0  # how long past its deadline a grader may ignore the alarm
MAX_DEATHS = 2
START_S = 120.0  # deadline of a grading process to come up
CLOSE_S = 20.0

Scored = list[tuple[Answer, Score]]


@dataclass(slots=True)
class _PendingAnswer:
    answer: Answer
    deaths: int = 0  # processes that ended while they graded it


@dataclass(slots=True)
class _Finished:
    """Scores of one thread that it has not handed over yet. A message costs its receivers about a
    millisecond, and cheap graders take a tenth of that for an answer."""

    scored: Scored = field(default_factory=list)
    handed_over: float = field(default_factory=time.monotonic)  # the last time

    @property
    def due(self) -> bool:
        return time.monotonic() - self.handed_over > HAND_OVER_S


class Scorer:
    """Scores answers in grading processes, started at once and replaced when they die.

    tasks: label -> task, where an answer's prompt_id begins with the label. Built here once too, so
    that a wrong argument is a UserError before anything starts. on_scored: called from the scorer's
    threads, one call at a time, with (answer, score) pairs in the order of completion. An exception
    of `on_scored`, or a grading process that does not start, ends the scorer: `submit`, `drain`,
    `check` and `close` then raise StageError.
    """

    def __init__(
        self,
        tasks: Mapping[str, EvalTaskSpec],
        grading: GradingSpec,
        *,
        on_scored: Callable[[Scored], None],
    ) -> None:
        for label, task in tasks.items():
            make_task(task.name, task.args, label=label)
        self._tasks = dict(tasks)
        self._grading = grading
        self._on_scored = on_scored
        self.scored = 0  # answers with a reward
        self.errors = 0
        self.timeouts = 0
        self._pending: deque[_PendingAnswer] = deque()
        self._unfinished = 0
        self._state = threading.Condition()
        self._handing_over = threading.Lock()
        self._workers: dict[int, GradingProcess] = {}
        self._failure: BaseException | None = None
        self._closing = False
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), name=f"scorer-{i}", daemon=True)
            for i in range(grading.grader_processes)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def unfinished(self) -> int:
        """Answers submitted and not yet passed to `on_scored`."""
        return self._unfinished

    def submit(self, answers: Sequence[Answer]) -> None:
        """Queue answers; returns at once. Raises ValueError for a prompt id of no known task."""
        for answer in answers:
            label, _, _ = parse_prompt_id(answer.prompt_id)
            if label not in self._tasks:
                known = ", ".join(self._tasks)
                raise ValueError(f"{answer.prompt_id}: no task is labelled {label!r}, only {known}")
        with self._state:
            self.check()
            if self._closing:
                raise StageError("answers were submitted to a scorer that is closed")
            self._pending.extend(_PendingAnswer(answer) for answer in answers)
            self._unfinished += len(answers)
            self._state.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Wait until everything submitted has been handed over. Raises DeadlineExceeded."""
        with self._state:
            if not self._state.wait_for(
                lambda: self._failure is not None or not self._unfinished, timeout_s
            ):
                raise DeadlineExceeded(
                    f"{self._unfinished} answers were not graded within {timeout_s:g} s"
                )
            self.check()

    def close(self) -> None:
        """Stop at once: kill the grading processes; answers that were not graded are dropped."""
        with self._state:
            self._closing = True
            self._state.notify_all()
            workers = list(self._workers.values())
        for worker in workers:
            worker.kill()
        for thread in self._threads:
            thread.join(CLOSE_S)
            if thread.is_alive():
                raise DeadlineExceeded(
                    f"{thread.name} did not end within {CLOSE_S:g} s of closing the scorer"
                )
        self.check()

    def check(self) -> None:
        """Raise StageError if the scorer has failed for good."""
        if self._failure is not None:
            raise StageError(f"scoring failed: {self._failure}") from self._failure

    def _serve(self, slot: int) -> None:
        finished = _Finished()
        try:
            while not self._closing:
                worker = self._worker(slot)
                chunk = self._next_chunk(wait=not finished.scored)
                if finished.scored and (finished.due or not chunk or not worker.alive):
                    self._hand_over(finished)
                if chunk:
                    self._grade(worker if worker.alive else self._worker(slot), chunk, finished)
        except Exception as error:  # of any kind: the callers of this scorer raise it
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
        worker = GradingProcess(self._tasks, self._grading, start_timeout_s=START_S)
        with self._state:
            self._workers[slot] = worker
        return worker

    def _next_chunk(self, *, wait: bool) -> list[_PendingAnswer]:
        """This process's share of the waiting answers; an answer on which a process died goes
        alone. Empty when closing, and without `wait` when there are none."""
        with self._state:
            self._state.wait_for(lambda: not wait or self._closing or self._pending)
            if self._closing or not self._pending:
                return []
            count = min(MAX_CHUNK, -(-len(self._pending) // len(self._threads)))
            chunk = [self._pending.popleft()]
            while len(chunk) < count and not chunk[0].deaths and not self._pending[0].deaths:
                chunk.append(self._pending.popleft())
            return chunk

    def _grade(
        self, worker: GradingProcess, chunk: list[_PendingAnswer], finished: _Finished
    ) -> None:
        """Have a process grade a chunk; answers without a score go back in the queue. What a
        process finished before it failed is handed over at once."""
        timeout_s = self._grading.grade_timeout_s
        started, done = time.monotonic(), 0
        try:
            worker.ask([_asked(e.answer) for e in chunk], timeout_s)
            for entry in chunk:
                started = time.monotonic()
                if finished.due or not worker.ready(HAND_OVER_S):
                    self._hand_over(finished)
                verdict = worker.receive(started + timeout_s + KILL_GRACE_S - time.monotonic())
                finished.scored.append(self._scored(entry.answer, verdict))
                done += 1
        except DeadlineExceeded:
            worker.kill()
            late = {"status": "timeout", "seconds": time.monotonic() - started}
            finished.scored.append(self._scored(chunk[done].answer, late))
            self._requeue(chunk[done + 1 :])
            self._hand_over(finished)
        except WorkerDied as death:
            culprit = chunk[done]
            culprit.deaths += 1
            if culprit.deaths >= MAX_DEATHS:
                seconds = time.monotonic() - started
                fault = {"status": "error", "error": str(death), "seconds": seconds}
                finished.scored.append(self._scored(culprit.answer, fault))
                done += 1
            self._requeue(chunk[done:])
            self._hand_over(finished)

    def _scored(self, answer: Answer, verdict: Mapping[str, Any]) -> tuple[Answer, Score]:
        ids = answer.group_id, answer.sample_index, answer.draw_id
        error = verdict.get("error", "")
        if verdict.get("status") == "timeout":
            error = f"the grader passed its deadline of {self._grading.grade_timeout_s:g} s"
        try:
            score = Score(
                *ids,
                verdict["status"],
                verdict.get("reward"),
                verdict.get("parts", {}),
                token_rewards=tuple(verdict.get("token_rewards", ())),
                error=error,
                seconds=verdict["seconds"],
                # training takes no votes, and every score travels
                answer="" if answer.purpose == "train" else str(verdict.get("answer", "")),
            ).checked()
        except (KeyError, TypeError, ValueError) as fault:  # of this answer alone
            error = f"the grading process did not send a verdict: {type(fault).__name__}: {fault}"
            score = Score(*ids, "error", error=error[:MAX_ERROR])
        return answer, score

    def _requeue(self, entries: list[_PendingAnswer]) -> None:
        with self._state:
            self._pending.extendleft(reversed(entries))
            self._state.notify_all()

    def _hand_over(self, finished: _Finished) -> None:
        done, finished.scored = finished.scored, []
        finished.handed_over = time.monotonic()
        if not done or self._closing:
            return
        with self._handing_over:
            self._on_scored(done)
        statuses = [score.status for _, score in done]
        with self._state:
            self.scored += statuses.count("ok")
            self.errors += statuses.count("error")
            self.timeouts += statuses.count("timeout")
            self._unfinished -= len(done)
            self._state.notify_all()


def _asked(answer: Answer) -> list[Any]:
    return [answer.prompt_id, answer.text, answer.tokens, list(answer.pieces)]
