"""A helper process of the sandbox, as the parent sees it: a Python of its own that takes one JSON
line, with descriptors, and answers with another."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START_S = 20.0  # deadline to come up
END_S = 10.0  # a killed process that still exists after this is stuck in the kernel
# The modules of this folder under a name of their own: the process has no site-packages and must
# not import the rest of rlcore.
BOOT = (
    "import importlib, sys, types\n"
    "package = types.ModuleType('sandbox')\n"
    "package.__path__ = [sys.argv[1]]\n"
    "sys.modules['sandbox'] = package\n"
    "importlib.import_module('sandbox.' + sys.argv[2]).main(int(sys.argv[3]))\n"
)
ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    # its threads would count as the program's, and each reserves address space
    "OPENBLAS_NUM_THREADS": "1",
}


class SandboxError(RuntimeError):
    """The sandbox itself failed, or this machine cannot confine programs; not a failure of the
    program."""


class NoAnswer(SandboxError):
    """A helper process gave no answer in time, or ended."""


class Helper:
    """One such process. `greeting`: what it said when it was ready.

    module: "server" or "judge". settings: its first line. Raises SandboxError if it cannot start.
    """

    def __init__(self, module: str, settings: dict[str, Any]) -> None:
        self._module = module
        self._link, theirs = socket.socketpair()
        here = str(Path(__file__).parent)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", BOOT, here, module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
        )
        theirs.close()
        try:
            self.send(settings)
            self.greeting = self.receive(START_S)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Raises NoAnswer if the process has ended."""
        data = json.dumps(message).encode() + b"\n"
        self._link.settimeout(START_S)
        try:
            sent = socket.send_fds(self._link, [data], descriptors)
            self._link.sendall(data[sent:])
        except OSError as error:
            raise NoAnswer(self._why(error)) from error

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next answer. Raises NoAnswer, or SandboxError for a fault that it reports."""
        self._link.settimeout(timeout_s)
        received = b""
        while not received.endswith(b"\n"):
            try:
                data = self._link.recv(1 << 16)
            except OSError as error:
                raise NoAnswer(self._why(error)) from error
            if not data:
                raise NoAnswer(self._why(None))
            received += data
        answer = json.loads(received)
        if "fault" in answer:
            raise SandboxError(f"a program could not be confined: {answer['fault']}")
        return answer

    def _why(self, error: OSError | None) -> str:
        if isinstance(error, TimeoutError):
            return f"the sandbox's {self._module} gave no answer in time"
        code = self._process.wait(END_S)
        return f"the sandbox's {self._module} ended with exit code {code}"

    def close(self) -> None:
        """End the process; what it forked dies with it. Safe to call twice."""
        self._process.kill()
        self._process.wait(END_S)
        self._link.close()
