"""Running programs that a model wrote: the parent's side. `sandbox_server.py` says how they are confined.

What it does not defend against: a program that finds, in its own memory, how its success is reported. Programs run
beside their tests; only what leaves the process is guarded.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("sandbox_server.py")
GRACE_S = 10.0  # beyond a program's own time limit: starting the server, forking, clearing up


class SandboxError(RuntimeError):
    """The sandbox itself failed, or this machine cannot confine programs; says nothing about the program."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use."""

    timeout_s: float = 5.0  # wall clock
    memory_mib: int = 512  # address space
    file_mib: int = 16  # in its temporary folder, all files together
    output_kib: int = 256  # stdout and stderr


@dataclass(frozen=True, slots=True)
class Outcome:
    """`passed` only if every part of the program ran to its end without an exception."""

    passed: bool
    why: str  # the limit it exceeded, the signal or exit code; "" if passed
    output: str  # the last 2000 characters of stdout and stderr
    seconds: float


class Sandbox:
    """A server with a clean environment that forks a confined process for every program. One caller at a time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._link, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(SERVER), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "TMPDIR": tempfile.gettempdir()},
        )
        theirs.close()

    def run(self, *parts: str) -> Outcome:
        """Run Python sources one after the other in one namespace. Raises SandboxError if the sandbox failed."""
        request = {"parts": parts, **asdict(self._limits)}
        try:
            answer = self._ask(request, self._limits.timeout_s + GRACE_S)
        except BaseException:  # a caller's deadline too: the link is out of step now
            self.close()
            raise
        if "fault" in answer:
            raise SandboxError(f"a program could not be confined: {answer['fault']}")
        return Outcome(**answer)

    def _ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self._link.settimeout(timeout_s)
        received = b""
        try:
            self._link.sendall(json.dumps(request).encode() + b"\n")
            while not received.endswith(b"\n"):
                if not (data := self._link.recv(1 << 16)):
                    raise SandboxError(f"the sandbox's server ended with exit code {self._process.wait(timeout_s)}")
                received += data
        except OSError as error:
            raise SandboxError(f"the sandbox's server gave no answer within {timeout_s:g} s: {error}") from error
        return json.loads(received)

    def close(self) -> None:
        """End the server; its programs die with it."""
        self._process.kill()
        self._process.wait(GRACE_S)
        self._link.close()
