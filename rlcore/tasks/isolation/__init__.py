"""Grading in processes that can do nothing but grade.

For scorers that parse, evaluate or execute text that a model wrote. A server (`server`) builds the
task once, with all its imports, and forks a process for every answer. It is confined as programs
are (`sandbox.confinement`): no network, no processes, no files but the libraries, limits of CPU
time and memory. Under rule="arithmetic" text is evaluated as arithmetic alone (`executed`), so that
nothing which the model wrote runs where the score is computed. Under rule="programs", for graders
that run programs on purpose, a program cannot leave its process. It can read the reference there,
however, and forge its own score: the tasks of `rlcore.tasks.code` keep program and verdict apart.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlcore.errors import StageError, UserError
from rlcore.tasks.arguments import ArgumentError
from rlcore.types import Grade, Item

START_S = 120.0  # what importing a task and making its data may take
QUEUE_S = 120.0  # for an answer, others before it included
REAP_S = 10.0
MAX_MESSAGE = 1 << 16  # bytes of a message on the control socket
MAX_REPLY = 16 << 20
RULES = ("arithmetic", "programs")
SECRETS = ("KEY", "TOKEN", "SECRET", "PASS", "CREDENTIAL")  # in names of variables
_inside = False


class IsolationError(RuntimeError):
    """The isolation itself failed; not a failure of the answer."""


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """Of one answer. `timeout_s`: seconds of CPU time, and of waiting for anything but a CPU.
    `memory_mib`: address space beyond the task's. `rule`: one of RULES."""

    timeout_s: float = 1.0
    memory_mib: int = 512
    rule: str = "arithmetic"
    layers: tuple[str, ...] = ()  # of `confinement.LAYERS`


@dataclass(frozen=True, slots=True)
class IsolatedVerdict:
    """Outcome of grading one answer.

    status: "ok"; "raised", by the grader; "executed", the answer would have been executed and was
    not; "stopped", by a limit or a signal. `why`: in words, "" for "ok".
    Example: IsolatedVerdict("ok", Grade(1.0), seconds=0.01)
    """

    status: str
    grade: Grade | None = None
    why: str = ""
    seconds: float = 0.0


def enter() -> None:
    """Say that this process is a server: tasks that it builds are not isolated again."""
    global _inside
    _inside = True


def inside() -> bool:
    """True in a server and in the processes that it forks."""
    return _inside


class IsolatedGrader:
    """Has a server grade answers of one task. Any thread, and any fork of this process, may ask.

    name, args, label: of `make_task`. The server starts with the first answer, or with `start`.
    """

    def __init__(
        self, name: str, args: Mapping[str, Any], label: str, limits: AnswerLimits
    ) -> None:
        self._settings = {
            "task": name,
            "args": dict(args),
            "label": label,
            "limits": asdict(limits),
        }
        self._lock = threading.Lock()
        self._server: _Server | None = None

    def start(self) -> None:
        """Start the server if there is none. Raises UserError for arguments that the task refuses,
        StageError if it does not come up."""
        with self._lock:
            if self._server is None or not self._server.alive:
                self._server = _Server(self._settings)

    def grade(self, prompt_id: str, response: str, tokens: Sequence[str] = ()) -> IsolatedVerdict:
        """Grade one answer. Raises IsolationError if the server fails twice, or the machine is too
        busy to judge."""
        started = time.monotonic()
        found = self._ask(prompt_id, [response, list(tokens)])
        if found["status"] == "late":
            raise IsolationError(f"this machine is too busy to judge an answer: {found['why']}")
        grade = found.pop("grade", None)
        return IsolatedVerdict(
            grade=None if grade is None else Grade(**_tuples(grade)),
            seconds=time.monotonic() - started,
            **found,
        )

    def item(self, prompt_id: str) -> Item:
        """The problem as the server's task makes it, which runs under a fixed hash seed. So a
        package whose problems depend on the order of sets has the same ones in every process."""
        found = self._ask(prompt_id, None)
        if "item" not in found:
            raise IsolationError(f"problem {prompt_id} could not be made: {found['why']}")
        return Item(**_tuples(found["item"]))

    def _ask(self, prompt_id: str, answer: Any) -> dict[str, Any]:
        """The server's reply. Raises IsolationError."""
        for last in (False, True):
            self.start()
            server = self._server
            assert server is not None
            try:
                return server.ask(prompt_id, answer)
            except OSError as error:
                server.close()
                if last:
                    why = f"the server of isolated graders failed: {error}"
                    raise IsolationError(why) from error
        raise AssertionError

    @property
    def pid(self) -> int | None:
        """Process id of the server, if there is one."""
        return None if self._server is None else self._server.pid

    def close(self) -> None:
        """End the server; the next answer starts another."""
        with self._lock:
            if self._server is not None:
                self._server.close()
            self._server = None


class _Server:
    """The other process. It ends when all copies of the control socket are closed."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._owner = os.getpid()
        self._folder = tempfile.TemporaryDirectory(
            prefix="rlcore-isolated-", ignore_cleanup_errors=True
        )
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        kept = {n: v for n, v in os.environ.items() if not any(s in n.upper() for s in SECRETS)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlcore.tasks.isolation.server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # a grader that prints without end must not block
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={
                    **kept,
                    "PYTHONPATH": path,
                    "TMPDIR": self._folder.name,
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    "MPLBACKEND": "Agg",
                    "PYTHONHASHSEED": "0",
                },
            )
        try:
            self._control.settimeout(START_S)
            given = {**settings, "folder": self._folder.name}
            self._control.send(json.dumps(given).encode())
            hello = json.loads(self._control.recv(MAX_MESSAGE) or b'{"fatal": "it ended"}')
        except (OSError, ValueError) as error:
            self.close()
            raise StageError(f"isolated graders did not start: {error!r}") from error
        if "argument" in hello:
            self.close()
            raise ArgumentError(*hello["argument"])
        if "refused" in hello:
            self.close()
            raise UserError(hello["refused"])
        if "fatal" in hello:
            self.close()
            raise StageError(f"isolated graders did not start: {hello['fatal']}")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._control.fileno() >= 0

    def ask(self, prompt_id: str, answer: Any) -> dict[str, Any]:
        """The verdict on an answer; of None, the problem. Raises OSError without a reply."""
        ours, theirs = socket.socketpair()
        word = b"item " if answer is None else b"grade "
        with ours:
            ours.settimeout(QUEUE_S)
            with theirs:
                socket.send_fds(self._control, [word + prompt_id.encode()], [theirs.fileno()])
            with contextlib.suppress(BrokenPipeError):  # its process has ended, which is answered
                ours.sendall(json.dumps(answer).encode() + b"\n")
            reply: dict[str, Any] = json.loads(_line(ours))
        return reply

    def close(self) -> None:
        """End the process, in the one that started it. Safe to call twice."""
        self._control.close()
        if os.getpid() != self._owner:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(REAP_S)
        self._folder.cleanup()


def _line(link: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"\n"):
        data = link.recv(1 << 16)
        if not data:
            raise ConnectionError("it ended without an answer")
        received += data
        if len(received) > MAX_REPLY:
            raise ConnectionError(f"it answered with more than {MAX_REPLY >> 20} MiB")
    return received


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
