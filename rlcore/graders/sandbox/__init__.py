"""Running programs that a model wrote, against tests that they cannot change.

The parent's side. A `Sandbox` has two helper processes, each a clean Python that takes one JSON
line, with descriptors, and answers with another. A server (`server`) forks a confined process for
every program (`program`; for every input of a program that reads and prints: `script`). A judge
(`judge`), itself confined, runs the tests and compares. Values cross between program and judge as
plain data (`values`); tests and expected values are never in the program's memory, nor in the
server's.

What it does not defend against: a program that computes what the tests happen to accept.
"""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlcore.graders.sandbox.confinement import LAYERS, available
from rlcore.graders.sandbox.server import LATE, WALL_TIMES

START_S = 20.0  # deadline to come up
END_S = 10.0  # a killed process that still exists after this is stuck in the kernel
# The modules of this folder under a name of their own: the process has no site-packages and must
# not import the rest of rlcore.
BOOT = (
    "import importlib, os, sys, types\n"
    "del os.environ['LD_BIND_NOW']\n"
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
    "MALLOC_ARENA_MAX": "1",  # every thread has one of 64 MiB otherwise
    "LD_BIND_NOW": "1",  # or every fork looks the same symbols up
}


class SandboxError(RuntimeError):
    """The sandbox itself failed, or this machine cannot confine programs; not a failure of the
    program."""


class NoAnswer(SandboxError):
    """A helper process gave no answer in time, or ended."""


class Helper:
    """One helper process. `greeting`: its message when it was ready.

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


GRACE_S = 10.0  # beyond the limit of wall-clock time: forking, clearing up
RENEW = 100  # programs after which a judge is replaced by a fresh one
PACKAGES = ("numpy", "sortedcontainers")  # that programs find, where they are installed
NUMPY = re.compile(r"\b(?:np|numpy)\b")


@dataclass(frozen=True, slots=True)
class Limits:
    """The resources that one program may use."""

    # of the program and its tests together: CPU seconds, and those in which it waits for something
    # other than a CPU
    timeout_s: float = 5.0
    memory_mib: int = 512  # address space
    file_mib: int = 16  # in its temporary folder, all files together, named or not
    output_kib: int = 256  # stdout and stderr


@dataclass(frozen=True, slots=True)
class ProgramTests:
    """The tests that judge a program. Example: ProgramTests("assert f(2) == 4", ("f",))"""

    source: str
    names: tuple[str, ...] = ()  # what they test: the program defines it, they see proxies
    classes: tuple[str, ...] = ()  # those of the names that are classes
    imports: str = ""  # statements that define what else they use
    effects: bool = False  # a call whose value they use changes its arguments, too
    # the program reads its input and prints: the tests call `answer(input)`, its output, which
    # runs it in a process of its own
    script: bool = False
    helpers: tuple[str, ...] = ()  # what else they use is what `reference` defines
    reference: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`passed` only if the program ran to its end and then its tests did, without an exception."""

    passed: bool
    why: str  # the limit it exceeded, how it ended, or what failed; "" if passed
    output: str  # the last 2000 characters of the program's stdout and stderr
    seconds: float
    calls: int = 0  # of the tests that reached the program


class Sandbox:
    """Runs programs, one at a time, for one caller. Ends with `close`.

    preamble: trusted source, run once in each helper, whose names programs and tests find. layers:
    of `confinement.LAYERS`; None: all that the machine has. Raises SandboxError if a layer cannot
    be set up.
    """

    def __init__(
        self, limits: Limits, *, preamble: str = "", layers: Sequence[str] | None = None
    ) -> None:
        self._limits = limits
        self._folder = tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True)
        self._settings: dict[str, Any] = {
            "limits": asdict(limits),
            "folder": self._folder.name,
            "preamble": preamble,
            "packages": _installed(PACKAGES),
            "layers": list(available() if layers is None else layers),
        }
        self._judge: Helper | None = None
        self._judged = 0
        self._server = Helper("server", self._settings)
        self.names = frozenset(self._server.greeting["names"])  # that the preamble defines

    @property
    def pids(self) -> list[int]:
        """Process ids of the helpers that run."""
        return [helper.pid for helper in (self._server, self._judge) if helper is not None]

    def run(
        self, program: str, tests: str | ProgramTests = "", names: Sequence[str] = ()
    ) -> Outcome:
        """Run a program, then its tests; a text: `ProgramTests` with these names. Raises
        SandboxError if the sandbox failed."""
        started = time.monotonic()
        if isinstance(tests, str):
            tests = ProgramTests(tests, tuple(names))
        try:
            verdict, answer = self._run(program, tests)
        except BaseException:  # a caller's deadline too: the helpers are out of step now
            self.close()
            raise
        if answer["limit"] == LATE:
            raise SandboxError(f"this machine is too busy to judge a program: {LATE}")
        passed = verdict["passed"] and not answer["limit"]
        why = answer["limit"] or answer["ended"] or verdict["why"]
        seconds = time.monotonic() - started
        calls = verdict.get("calls", 0)
        return Outcome(passed, "" if passed else why, answer["output"], seconds, calls)

    def _run(self, program: str, tests: ProgramTests) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the judge's verdict, the server's answer)."""
        numpy = any(map(NUMPY.search, (program, tests.source, tests.imports, tests.reference)))
        given = asdict(tests)
        job = {"program": program, "tests": given.pop("source"), **given, "numpy": numpy}
        ours, theirs = socket.socketpair()
        self._ready_judge()  # its start takes none of the program's time
        with ours, theirs:
            judge = self._give(job, ours.fileno())
            request = {"numpy": numpy, "judge": judge.pid, "scripted": tests.script}
            self._server.send(request, [theirs.fileno()])
        try:
            verdict = judge.receive(WALL_TIMES * self._limits.timeout_s + GRACE_S)
        except NoAnswer as error:  # ended or kept busy by the program's data: it has not passed
            verdict = {"passed": False, "ended": False, "clean": False, "why": str(error)}
        if not verdict["clean"]:
            self._end_judge()
        self._server.send({"ended": verdict["ended"]})
        return verdict, self._server.receive(GRACE_S)

    def _give(self, job: dict[str, Any], channel: int) -> Helper:
        """The judge that has taken this job."""
        if self._judged >= RENEW:
            self._end_judge()
        try:
            judge = self._ready_judge()
            judge.send(job, [channel])
        except NoAnswer:  # it ended after its last program, not because of this one
            self._end_judge()
            judge = self._ready_judge()
            judge.send(job, [channel])
        self._judged += 1
        return judge

    def _ready_judge(self) -> Helper:
        if self._judge is None:
            self._judge = Helper("judge", self._settings)
            self._judged = 0
        return self._judge

    def _end_judge(self) -> None:
        if self._judge is not None:
            self._judge.close()
            self._judge = None

    def close(self) -> None:
        """End the helpers; programs die with them. Safe to call twice."""
        self._server.close()
        self._end_judge()
        self._folder.cleanup()


def _installed(names: Sequence[str]) -> dict[str, str]:
    """Folders of the installed ones among these packages."""
    found = {}
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            found[name] = next(iter(spec.submodule_search_locations))
    return found


__all__ = ["LAYERS", "Limits", "Outcome", "ProgramTests", "Sandbox", "SandboxError", "available"]
