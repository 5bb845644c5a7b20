"""The process that isolated graders come from: `python -m rlcore.tasks.isolation.server <fd>`.

It builds the task once and then forks a process for every answer. Over the control socket come
first the settings, answered by {"ready": true}, or why it cannot be. Then come datagrams. "grade
PROMPT_ID" has the end of a stream, on which the answer arrives and the verdict leaves. "item
PROMPT_ID" is answered by the problem. The answer is read in the forked process alone, and that
process has no descriptor but a pipe for its verdict. What it does after its verdict has no
effect."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlcore.errors import UserError
from rlcore.graders.sandbox.clock import Clock
from rlcore.graders.sandbox.confinement import Confinement, make_root, own_mounts
from rlcore.graders.sandbox.server import LATE, WALL_TIMES
from rlcore.interfaces import Task
from rlcore.registry import resolve
from rlcore.tasks import TASKS, isolation, parse_prompt_id
from rlcore.tasks.arguments import ArgumentError
from rlcore.tasks.grades import as_grade, wants_tokens
from rlcore.tasks.grading_worker import adopt_orphans, die_with_parent, end_descendants
from rlcore.tasks.isolation.confine import readable
from rlcore.tasks.isolation.executed import ArithmeticOnly
from rlcore.types import Item

COLD_S = 5.0  # of CPU time
WARMINGS = 3  # a grader that cannot judge its known answers costs no more than so many
VERDICT_FD = 3
POLL_S = 0.02
MAX_ERROR = 300  # characters
MAX_VERDICT = 8 << 20  # bytes


class IsolationServer:
    """The task, and what is prepared for every fork."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._limits = settings["limits"]
        self._folder, layers = settings["folder"], self._limits["layers"]
        self._chroot = "tmpfs" in layers
        packages = readable()
        if self._chroot:  # before a module starts threads
            own_mounts()
            make_root(self._folder, packages.values())
        self._task = built(settings["task"], settings["args"], settings["label"])
        self._grade: Callable[..., Any] = getattr(self._task, "judge", self._task.grade)
        self._tokens = wants_tokens(self._grade)
        self._item: Item | None = None  # of the last answer
        self._followed: set[str] = set()  # names of modules that `_import` has tried
        self._warmings = WARMINGS  # left, until a known answer is graded to its end
        self._may_fork = "seccomp" not in layers
        self._confine(layers, packages)
        os.environ.update(HOME=self._folder, TMPDIR=self._folder)
        tempfile.tempdir = self._folder

    def _confine(self, layers: list[str], packages: dict[str, str]) -> None:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limits = {
            "RLIMIT_AS": size + (self._limits["memory_mib"] << 20),
            "RLIMIT_CPU": math.ceil(max(self._limits["timeout_s"], COLD_S)) + 1,
            "RLIMIT_FSIZE": 0,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
        }
        self._confinement = Confinement(layers, limits, folder=None, packages=packages)
        self._rules = self._confinement.rules()

    def answer(self, word: str, prompt_id: str, stream: int) -> dict[str, Any]:
        """The problem, or the verdict on the answer that a stream brings."""
        try:
            item = self._problem(prompt_id)
        except Exception as error:  # of any kind: the task may be a user's own
            return {"status": "raised", "why": _words(error)}
        return {"item": asdict(item)} if word == "item" else self._judged(item, stream)

    def _judged(self, item: Item, stream: int) -> dict[str, Any]:
        if self._warmings:
            self._warm(item)
        return self._forked(item, lambda: json.loads(_received(stream)), self._limits["timeout_s"])

    def _warm(self, item: Item) -> None:
        """Have the known answer graded first: its process imports what the grader needs, which may
        take seconds of a slow processor, and no answer of a model gets those."""
        own = None if hasattr(self._task, "judge") else self._task.worked_answer(item)
        known = [own or item.answer, []]
        seconds = max(self._limits["timeout_s"], COLD_S)
        verdict = self._forked(item, lambda: known, seconds)
        done = verdict["status"] not in ("stopped", "late")
        self._warmings = 0 if done else self._warmings - 1

    def _forked(self, item: Item, read: Callable[[], Any], seconds: float) -> dict[str, Any]:
        out, theirs = os.pipe()
        try:
            pid = self._fork(theirs, read, item, seconds)
        finally:
            os.close(theirs)
        try:
            verdict = self._watched(pid, out, seconds)
        finally:
            os.close(out)
            if self._may_fork:
                end_descendants()
        self._import(verdict.pop("modules", []))
        return verdict

    def _import(self, modules: list[str]) -> None:
        """Import what a scorer has imported in its process, so that later ones find it. Programs
        of a model may import anything: they are not followed."""
        if self._limits["rule"] != "arithmetic" or not modules:
            return
        for name in set(modules) - self._followed:
            self._followed.add(name)
            with contextlib.suppress(Exception):  # its process finds out, too
                importlib.import_module(name)
        gc.freeze()

    def _problem(self, prompt_id: str) -> Item:
        if self._item is None or self._item.prompt_id != prompt_id:
            _, split, index = parse_prompt_id(prompt_id)
            self._item = self._task.item(split, index)
        return self._item

    def _watched(self, pid: int, out: int, seconds: float) -> dict[str, Any]:
        """Read a process's verdict and end the process."""
        data, clock = b"", Clock(pid, os.getpid())
        waiting = select.poll()
        waiting.register(out, select.POLLIN)
        stopped = ""
        while not data.endswith(b"\n") and not stopped:
            if waiting.poll(1000 * POLL_S):
                piece = os.read(out, 1 << 16)
                if not piece:
                    break
                data += piece
                if len(data) > MAX_VERDICT:
                    stopped = f"more than {MAX_VERDICT >> 20} MiB of verdict"
            elif clock.charged() > seconds:
                stopped = _time_limit(seconds)
            elif clock.wall() > WALL_TIMES * seconds:
                stopped = LATE
        if stopped or data.endswith(b"\n"):
            os.kill(pid, signal.SIGKILL)  # its verdict is given
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if stopped == LATE:
            return {"status": "late", "why": LATE}
        if not stopped and data.endswith(b"\n"):
            with contextlib.suppress(ValueError, RecursionError):
                verdict = json.loads(data)
                if isinstance(verdict, dict):
                    return verdict
        return {"status": "stopped", "why": stopped or _how(code, seconds)}

    def _fork(self, out: int, read: Callable[[], Any], item: Item, seconds: float) -> int:
        """A confined process that grades one answer and never returns here; its number."""
        server = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            die_with_parent(signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            response, tokens = read()
            _keep(out, self._rules)
            if self._chroot:
                os.chroot(self._folder)
            os.chdir("/")
            self._confinement.apply(None if self._rules is None else VERDICT_FD + 1)
            verdict = self._verdict(item, response, tokens, seconds)
            _write(json.dumps(verdict).encode() + b"\n")
        finally:
            os._exit(1)

    def _verdict(
        self, item: Item, response: str, tokens: list[str], seconds: float
    ) -> dict[str, Any]:
        before = set(sys.modules)
        rule = ArithmeticOnly()
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        if self._limits["rule"] == "arithmetic":
            rule.install()
        further = {"tokens": tokens} if self._tokens else {}
        verdict: dict[str, Any]
        try:
            grade = as_grade(self._grade(item, response, **further))
            verdict = {"status": "ok", "grade": asdict(grade)}
        except MemoryError:
            verdict = {"status": "stopped", "why": "memory limit"}
        except BaseException as error:  # sys.exit() in a grader as well
            verdict = {"status": "raised", "why": _words(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        if rule.why:
            verdict = {"status": "executed", "why": rule.why}
        return {**verdict, "modules": sorted(set(sys.modules) - before)}


def built(name: str, args: dict[str, Any], label: str) -> Task:
    """The task, with arguments that were checked before. Raises ArgumentError as the class does,
    for the process that knows the task's key."""
    task: Task = resolve(TASKS, name, key="task.name", like=Task)(**args)
    task.name = label
    return task


def _time_limit(seconds: float) -> str:
    return f"time limit of {seconds:g} s"


def _how(code: int, seconds: float) -> str:
    if -code in (signal.SIGPROF, signal.SIGXCPU, signal.SIGKILL):
        return _time_limit(seconds)
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code} without a verdict"


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:MAX_ERROR]


def _received(stream: int) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        piece = os.read(stream, 1 << 16)
        if not piece:
            os._exit(1)  # nobody waits for the verdict
        data += piece
    return data


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(VERDICT_FD, data) :]


def _keep(out: int, rules: int | None) -> None:
    """Give this process no descriptor but nothing to read, nothing to write to, the pipe for the
    verdict, and the file rules at the next number."""
    above = 1 + max(out, rules or 0, VERDICT_FD + 1)
    os.dup2(out, above)
    if rules is not None:
        os.dup2(rules, above + 1)
    null = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(null, target)
    os.dup2(above, VERDICT_FD)
    kept = VERDICT_FD + 1
    if rules is not None:
        os.dup2(above + 1, kept)
        kept += 1
    os.closerange(kept, os.sysconf("SC_OPEN_MAX"))


def main(fd: int) -> None:
    os.set_inheritable(fd, False)
    control = socket.socket(fileno=fd)
    first = control.recv(isolation.MAX_MESSAGE)
    if not first:
        return
    isolation.enter()
    adopt_orphans()
    try:
        server = IsolationServer(json.loads(first))
    except ArgumentError as error:
        said = [error.name, error.value, error.why]
        control.send(json.dumps({"argument": said}, default=str).encode())
        return
    except UserError as error:
        control.send(json.dumps({"refused": str(error)}).encode())
        return
    except OSError as error:
        control.send(json.dumps({"fatal": f"a grader could not be confined: {error}"}).encode())
        return
    # A collection in a fork leaves frozen objects alone, so that their pages stay shared.
    gc.collect()
    gc.freeze()
    gc.disable()
    control.send(b'{"ready": true}')
    while True:
        asked, fds, _, _ = socket.recv_fds(control, isolation.MAX_MESSAGE, 1)
        if not fds:  # nobody is left to ask
            return
        word, _, prompt_id = asked.decode().partition(" ")
        with socket.socket(fileno=fds[0]) as stream:
            verdict = server.answer(word, prompt_id, stream.fileno())
            stream.settimeout(isolation.REAP_S)
            with contextlib.suppress(OSError):  # who asked has given up
                stream.sendall(json.dumps(verdict).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
