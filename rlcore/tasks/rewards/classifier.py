"""A reward model as a local sequence classifier, in its own process."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.errors import DeadlineExceeded, StageError
from rlcore.tasks.grading_process import WorkerDied, WorkerProcess
from rlcore.tasks.rewards.protocols import Reward, RewardQuery, RewardVerdict, Tell
from rlcore.tasks.rewards.specs import ClassifierSpec

START_S = 300.0  # deadline of the process to load its model
CLOSE_S = 20.0
MAX_DEATHS = 2
WORKER = "rlcore.tasks.rewards.classifier_worker"


@dataclass(slots=True)
class _PendingText:
    asked: RewardQuery
    tell: Tell
    deaths: int = 0  # processes that ended while they judged it


class ClassifierReward(Reward):
    """Batches of samples for one process, which is replaced when it dies or passes its deadline.

    key: the config key of its settings. A process that does not start ends the scoring: `check`
    raises StageError.
    """

    def __init__(self, key: str, spec: ClassifierSpec, *_: object) -> None:
        """It has its own process and needs no thread for requests."""
        self._key = key
        self._spec = spec
        self._pending: deque[_PendingText] = deque()
        self._state = threading.Condition()
        self._process: WorkerProcess | None = None
        self._failure: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=f"reward-{key}", daemon=True)
        self._thread.start()

    def submit(self, asked: RewardQuery, tell: Tell) -> None:
        with self._state:
            self._pending.append(_PendingText(asked, tell))
            self._state.notify_all()

    def check(self) -> None:
        if self._failure is not None:
            raise StageError(f"{self._key}: {self._failure}") from self._failure

    def close(self) -> None:
        with self._state:
            self._closing = True
            self._state.notify_all()
            process = self._process
        if process is not None:
            process.kill()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"{self._key} did not end within {CLOSE_S:g} s of closing it")

    def _serve(self) -> None:
        try:
            while not self._closing:
                process = self._started()
                batch = self._next_batch()
                if batch:
                    self._judge(process if process.alive else self._started(), batch)
        except Exception as error:  # of any kind: `check` raises it
            with self._state:
                if not self._closing:
                    self._failure = error
        finally:
            if self._process is not None:
                self._process.close()

    def _started(self) -> WorkerProcess:
        """The process; a new one if there is none or it has ended."""
        if self._process is not None and self._process.alive:
            return self._process
        if self._process is not None:
            self._process.close()
        process = WorkerProcess(
            WORKER,
            self._spec.model_dump(mode="json"),
            who="the classifier's process",
            start_timeout_s=START_S,
        )
        with self._state:
            self._process = process
            if self._closing:
                process.kill()
        return process

    def _next_batch(self) -> list[_PendingText]:
        """Return the waiting samples, up to a batch; a sample that a process died on goes alone.
        Empty when closing."""
        with self._state:
            self._state.wait_for(lambda: self._closing or self._pending)
            if self._closing:
                return []
            batch = [self._pending.popleft()]
            while (
                self._pending
                and len(batch) < self._spec.batch_size
                and not batch[0].deaths
                and not self._pending[0].deaths
            ):
                batch.append(self._pending.popleft())
            return batch

    def _judge(self, process: WorkerProcess, batch: list[_PendingText]) -> None:
        started = time.monotonic()
        deadline = started + self._spec.timeout_s
        judged = 0
        try:
            process.ask(
                [(entry.asked.question, entry.asked.response) for entry in batch],
                self._spec.timeout_s,
            )
            for entry in batch:
                said = process.receive(max(deadline - time.monotonic(), 1e-3))
                seconds = time.monotonic() - started
                judged += 1
                if "error" in said:
                    entry.tell(RewardVerdict("error", error=said["error"], seconds=seconds))
                else:
                    entry.tell(RewardVerdict("ok", said.get("value"), seconds=seconds))
        except DeadlineExceeded:
            process.kill()
            limit = f"the classifier passed its deadline of {self._spec.timeout_s:g} s"
            self._fail(
                batch[judged:], RewardVerdict("timeout", error=limit, seconds=_since(started))
            )
        except WorkerDied as death:
            left = batch[judged:]
            for entry in left:
                entry.deaths += 1
            failed = RewardVerdict("error", error=str(death), seconds=_since(started))
            self._fail([entry for entry in left if entry.deaths >= MAX_DEATHS], failed)
            self._requeue([entry for entry in left if entry.deaths < MAX_DEATHS])

    def _fail(self, entries: Sequence[_PendingText], verdict: RewardVerdict) -> None:
        if not self._closing:
            for entry in entries:
                entry.tell(verdict)

    def _requeue(self, entries: Sequence[_PendingText]) -> None:
        with self._state:
            self._pending.extendleft(reversed(entries))


def _since(start: float) -> float:
    return time.monotonic() - start
