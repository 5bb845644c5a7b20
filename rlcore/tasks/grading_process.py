"""Parent side of a worker process: start it, send items, await each verdict under a deadline, kill
it with its children.

Not multiprocessing: its children import the parent's main module again (inside a Ray worker, Ray),
and a pool's deadline is for a whole chunk. Here a verdict arrives for every item, with the number
that the item was asked under, so the item at fault is always known. A process that answers anything
else has failed: it is killed, since its later answers could not be assigned to an item.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.errors import DeadlineExceeded, StageError
from rlcore.tasks.grading_worker import EXIT_OUT_OF_MEMORY
from rlcore.tasks.specs import EvalTaskSpec, GradingSpec

MAX_LINE = 16 << 20  # bytes of an answer
REAP_S = 10.0  # a killed process that still exists after this is stuck in the kernel


class WorkerDied(Exception):
    """The worker ended while it held items; the message says how."""


class WorkerProcess:
    """One worker in a separate session, so that whatever it started is killed with it.

    module: run as `python -m MODULE <socket fd>`; answers `settings` with {"ready": true} or
    {"fatal": sentence}. who: what it is called in messages. Raises StageError if it does not come
    up within start_timeout_s.
    """

    def __init__(
        self, module: str, settings: Mapping[str, Any], *, who: str, start_timeout_s: float
    ) -> None:
        self._who = who
        self._rest = b""
        self._count = 0  # items asked so far: the number of the next one
        self._owed: deque[int] = deque()  # numbers of the items that have no answer yet
        self._killed = False
        # The temporary folder is deleted with the process, however it ends.
        self._folder = tempfile.TemporaryDirectory(
            prefix="rlcore-grading-", ignore_cleanup_errors=True
        )
        self._link, theirs = socket.socketpair()
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a grader that prints without end must not block
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "TMPDIR": self._folder.name,
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
        )
        theirs.close()
        try:
            self._send(settings, start_timeout_s)
            hello = self._message(start_timeout_s)
        except (WorkerDied, DeadlineExceeded) as error:
            self.close()
            raise StageError(f"{who} did not start: {error}") from error
        if "fatal" in hello:
            self.close()
            raise StageError(f"{who} did not start: {hello['fatal']}")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, items: Sequence[Sequence[Any]], timeout_s: float) -> None:
        """Send items to the worker; a verdict for each item, in order, is then read with
        `receive`."""
        numbers = range(self._count, self._count + len(items))
        self._count += len(items)
        self._owed.extend(numbers)
        self._send([[n, *item] for n, item in zip(numbers, items, strict=True)], timeout_s)

    def _send(self, message: Any, timeout_s: float) -> None:
        self._link.settimeout(timeout_s)
        try:
            self._link.sendall(json.dumps(message).encode() + b"\n")
        except TimeoutError as error:
            raise DeadlineExceeded(f"it took no input for {timeout_s:g} s") from error
        except OSError as error:
            raise WorkerDied(self._how_it_ended()) from error

    def ready(self, timeout_s: float) -> bool:
        """Wait up to timeout_s seconds for something to receive."""
        poll = select.poll()  # `select` takes no descriptor above 1023
        poll.register(self._link, select.POLLIN)
        return b"\n" in self._rest or bool(poll.poll(1000 * timeout_s))

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The verdict on the next item. Raises DeadlineExceeded after timeout_s seconds, WorkerDied
        if there will be none, or if the message is not an answer to that item."""
        verdict = self._message(timeout_s)
        number = self._owed.popleft()
        if verdict.get("id") != number:
            raise self._failed("answered something that it was not asked")
        return verdict

    def _message(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            self._link.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                data = self._link.recv(1 << 16)
            except TimeoutError as error:
                raise DeadlineExceeded(f"no answer within {timeout_s:g} s") from error
            except OSError as error:
                raise WorkerDied(self._how_it_ended()) from error
            if not data:
                raise WorkerDied(self._how_it_ended())
            self._rest += data
            if len(self._rest) > MAX_LINE:
                raise self._failed(f"answered with more than {MAX_LINE >> 20} MiB")
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._failed("answered what is not JSON") from error
        if not isinstance(message, dict):
            raise self._failed("answered, but not with a JSON object")
        return message

    def _failed(self, how: str) -> WorkerDied:
        """Kill the worker for a malformed message; returns the error to raise."""
        self.kill()
        return WorkerDied(f"{self._who} {how}, and was killed")

    def _how_it_ended(self) -> str:
        self.kill()
        code = self._process.returncode
        if code < 0:
            return f"{self._who} was killed by {signal.Signals(-code).name}"
        return f"{self._who} exited with code {code}"

    def kill(self) -> None:
        """End the worker and its children now. Safe to call from any thread, and twice."""
        if not self._killed:
            self._killed = True
            self._end()
        self._process.wait(REAP_S)

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # all of the group has ended
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the worker and remove its temporary folder."""
        self.kill()
        self._link.close()
        self._folder.cleanup()


class GradingProcess(WorkerProcess):
    """One process of the tasks' own graders, asked with (prompt id, response)."""

    def __init__(
        self,
        tasks: Mapping[str, EvalTaskSpec],
        grading: GradingSpec,
        *,
        start_timeout_s: float,
    ) -> None:
        self._memory_mib = grading.grader_memory_mib
        settings = {
            "tasks": {label: [task.name, task.args] for label, task in tasks.items()},
            "timeout_s": grading.grade_timeout_s,
            "memory_mib": grading.grader_memory_mib,
        }
        super().__init__(
            "rlcore.tasks.grading_worker",
            settings,
            who="a grading process",
            start_timeout_s=start_timeout_s,
        )

    def _end(self) -> None:
        """End the worker: the watching process ends all processes that graders have started, in any
        session."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_S)
        super()._end()

    def _how_it_ended(self) -> str:
        how = super()._how_it_ended()
        if self._process.returncode == EXIT_OUT_OF_MEMORY:
            return f"the grader needed more than {self._memory_mib} MiB of memory"
        return how
