"""Disk work in threads, under deadlines: a network disk may hang indefinitely."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from rlcore.errors import DeadlineExceeded

T = TypeVar("T")
POLL_S = 0.02


class Disk(Executor):
    """Runs each job in a thread of its own that ends with the process: unlike those of a thread
    pool, one that hangs keeps neither later jobs nor the exit waiting."""

    def __init__(self) -> None:
        self._running = 0
        self._lock = threading.Lock()

    @property
    def running(self) -> int:
        """Jobs that have not ended, including abandoned ones."""
        return self._running

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Start a job."""
        future: Future[T] = Future()
        with self._lock:
            self._running += 1

        def work() -> None:
            result, error = None, None
            try:
                result = fn(*args, **kwargs)
            except BaseException as e:  # passed to the waiter, as by any executor
                error = e
            # first: who sees the result must not see the job running
            with self._lock:
                self._running -= 1
            if error is None:
                future.set_result(result)  # type: ignore[arg-type]
            else:
                future.set_exception(error)

        threading.Thread(target=work, name="disk", daemon=True).start()
        return future

    async def idle(self, timeout_s: float) -> bool:
        """Whether every job has ended, after waiting for up to `timeout_s` of real time."""
        deadline = time.monotonic() + timeout_s
        while self._running and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        return not self._running

    async def run(self, job: Callable[[], T], *, timeout_s: float, what: str) -> T:
        """A job's result. Raises DeadlineExceeded after `timeout_s`; the job may go on."""
        running = asyncio.get_running_loop().run_in_executor(self, job)
        # not wait_for: it would cancel a job that has begun, and lose what it raises
        done, _ = await asyncio.wait([running], timeout=timeout_s)
        if not done:
            running.add_done_callback(lambda late: late.cancelled() or late.exception())
            raise DeadlineExceeded(f"the disk took more than {timeout_s:g} s to {what}")
        return running.result()

    def leave(self, job: Callable[[], object]) -> None:
        """Run a job in the background and ignore its errors."""
        running = asyncio.get_running_loop().run_in_executor(self, job)
        running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
