"""Parent side of the environments' processes: each open episode has one."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from typing import Any

from rlcore.environments.server import MAX_DATAGRAM
from rlcore.environments.specs import EnvironmentJob
from rlcore.errors import StageError

START_S = 120.0  # what importing the task and the environment may take
SEND_S = 10.0  # a process that takes no input for longer hangs
MAX_LINE = 16 << 20  # bytes of an answer; what sends more has failed
REAP_S = 10.0


class EnvironmentDied(Exception):
    """An environment's process ended, or sent what it must not; the message says which."""


def _readable(connection: socket.socket) -> bool:
    poll = select.poll()  # `select` takes no descriptor above 1023
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


class Link:
    """The connection to one environment. Calls are answered one at a time, in order and under their
    numbers."""

    def __init__(self, server: EnvironmentServer) -> None:
        self.socket, theirs = socket.socketpair()
        self._server = server
        self._rest = b""
        self._pid = 0
        self._asked: deque[str] = deque()  # names of the calls without an answer
        self._answered = 0  # calls
        self.episodes = 0  # that it has served
        with theirs:
            server.fork(theirs)
        self.socket.settimeout(SEND_S)

    def fileno(self) -> int:
        return self.socket.fileno()

    def call(self, name: str, **arguments: Any) -> None:
        """Send a call. Raises EnvironmentDied."""
        try:
            self._asked.append(name)
            call = {"call": name, "id": self._answered + len(self._asked), **arguments}
            self.socket.sendall(json.dumps(call).encode() + b"\n")
        except OSError as error:
            raise EnvironmentDied("the environment's process died") from error

    def receive(self) -> dict[str, Any] | None:
        """Return the answer to the first call that has none, with the call's name as `call`, once
        there is something to read; None if it is not yet whole.

        Raises EnvironmentDied.
        """
        try:
            data = b"" if self.has_more else self.socket.recv(1 << 20)
        except OSError as error:
            raise EnvironmentDied(self._server.why(self._pid)) from error
        if not data and not self.has_more:
            raise EnvironmentDied(self._server.why(self._pid))
        self._rest += data
        if len(self._rest) > MAX_LINE:
            raise EnvironmentDied(f"an environment answered with more than {MAX_LINE >> 20} MiB")
        message = self._next()
        if message is not None and not self._pid:  # what a process says first
            self._pid = int(message["pid"])
            message = self._next()
        if message is None:
            return None
        self._answered += 1
        if message.get("id") != self._answered or not self._asked:
            raise EnvironmentDied("the environment's process answered what it was not asked")
        return {**message, "call": self._asked.popleft()}

    @property
    def owes(self) -> int:
        """Calls without an answer."""
        return len(self._asked)

    @property
    def has_more(self) -> bool:
        """True if a further answer has been read already."""
        return b"\n" in self._rest

    def _next(self) -> dict[str, Any] | None:
        line, found, rest = self._rest.partition(b"\n")
        if not found:
            return None
        self._rest = rest
        try:
            message: dict[str, Any] = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise EnvironmentDied("the environment's process answered what is not JSON") from error
        if not isinstance(message, dict):
            raise EnvironmentDied("the environment's process answered, but not with a JSON object")
        return message

    @property
    def alive(self) -> bool:
        """True if a process that owes no answer is still there: otherwise its link would be
        readable."""
        return not _readable(self.socket)

    def kill(self) -> None:
        """Kill the process."""
        self.socket.close()  # which ends one that waits for a call
        if self._pid:
            self._server.kill(self._pid)


class EnvironmentServer:
    """The process that environments are forked from. Raises StageError if it does not start."""

    def __init__(self, job: EnvironmentJob) -> None:
        self._reasons: dict[int, str] = {}  # why children were ended, by their process ids
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlcore.environments.server", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # an environment that prints without end must not block
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        try:
            self._start(job)
        except (OSError, ValueError) as error:
            self.close()
            raise StageError(f"the environments' process did not start: {error!r}") from error

    def _start(self, job: EnvironmentJob) -> None:
        self._control.settimeout(START_S)
        settings = {
            "environment": job.environment.model_dump(mode="json"),
            "task": job.task.name,
            "task_args": job.task.args,
            "label": job.label,
        }
        self._control.send(json.dumps(settings).encode())
        hello = json.loads(self._control.recv(MAX_DATAGRAM) or b'{"fatal": "it ended"}')
        if "fatal" in hello:
            self.close()
            raise StageError(f"the environments' process did not start: {hello['fatal']}")
        self._control.settimeout(SEND_S)

    def open(self) -> Link:
        """A link to a new process. Raises StageError if the server has ended."""
        return Link(self)

    def fork(self, theirs: socket.socket) -> None:
        """Have a child serve this end of a link."""
        try:
            socket.send_fds(self._control, [b"new"], [theirs.fileno()])
        except OSError as error:
            raise StageError(f"the environments' process has ended: {error!r}") from error

    def why(self, pid: int) -> str:
        """Say why a child has ended."""
        with contextlib.suppress(OSError, ValueError):
            # asked first: a socket with a timeout waits for it even with MSG_DONTWAIT
            while _readable(self._control) and (said := self._control.recv(MAX_DATAGRAM)):
                told = json.loads(said)
                self._reasons[int(told["pid"])] = str(told["why"])
        return self._reasons.pop(pid, "the environment's process died")

    def kill(self, pid: int) -> None:
        """End a child. A server that has ended has taken its children with it."""
        with contextlib.suppress(OSError):
            self._control.send(f"kill {pid}".encode())

    def close(self) -> None:
        """End the server and all its children, which die with it."""
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it ends what its children started
            self._process.wait(REAP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(REAP_S)
