"""Files written behind the computation: a disk that hangs holds up its own thread and nothing
else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from rlcore.errors import DeadlineExceeded

Job = Callable[[], object]


class WriteBehind:
    """Jobs of one checkpoint, done in order in a thread that ends with the process.

    After an error, or once `wait` has given up, the jobs that have not begun are dropped, and with
    them the memory they hold.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._ended: Future[None] = Future()
        self._given_up = False
        threading.Thread(target=self._work, name="checkpoint", daemon=True).start()

    @property
    def running(self) -> bool:
        """Whether it is still writing."""
        return not self._ended.done()

    def put(self, job: Job) -> None:
        """Queue a job."""
        self._jobs.put(job)

    def close(self) -> None:
        """No more jobs come."""
        self._jobs.put(None)

    def _work(self) -> None:
        error: BaseException | None = None
        while (job := self._jobs.get()) is not None:
            if error is not None or self._given_up:
                continue
            try:
                job()
            except BaseException as e:  # raised by `wait`
                error = e
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def wait(self, timeout_s: float) -> None:
        """Return when all is written, after `close`. Raises what a job raised, and DeadlineExceeded
        after `timeout_s`."""
        try:
            self._ended.exception(timeout_s)
        except TimeoutError as e:
            self._given_up = True
            raise DeadlineExceeded(
                f"the disk took more than {timeout_s:g} s to write the learner's state "
                f"(checkpoint.write_timeout_s={timeout_s:g})."
            ) from e
        self._ended.result()


class Discarded(WriteBehind):
    """In place of a checkpoint that would have to wait for one before it: nothing is written."""

    def __init__(self) -> None:
        """Without a thread."""

    @property
    def running(self) -> bool:
        """False: no later checkpoint waits for this one."""
        return False

    def put(self, job: Job) -> None:
        """Drop a job."""

    def close(self) -> None:
        """Nothing."""

    def wait(self, timeout_s: float) -> None:
        """Raises DeadlineExceeded."""
        raise DeadlineExceeded(
            "the learner's disk has not ended what it was asked for at an earlier checkpoint."
        )
