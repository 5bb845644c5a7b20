"""The server of a sandbox: `main(fd)` in its own Python, started by `helper`.

Standard library only, isolated (-I -S): no secrets, no environment, no third-party package unless a
program needs one. Every program is a fork of it, confined. It never sees a program or its tests:
the parent sends both to the judge, which sends the program to its process. So neither is in the
memory that a program starts with. The server watches time, output and threads, and kills a program
that exceeds a limit. A program is charged for the seconds of the clock, less those in which it or
its judge was ready to run and had no CPU. So a verdict does not depend on other loads of the
machine. It is charged for CPU seconds, if they are more. A program that has not ended after
WALL_TIMES its limit has no verdict.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any

from . import program, script
from .clock import Clock, Tally
from .confinement import (
    LIBC,
    PR_SET_PDEATHSIG,
    Confinement,
    make_root,
    mount_tmpfs,
    own_mounts,
    unmount,
)
from .values import Channel, receive_line, send_line

CHANNEL_FD = 3
RULES_FD = 4
POLL_S = 0.05
MAX_FILES = 1000
MAX_THREADS = 64
SHOWN = 2000  # characters of the output that are reported
WALL_TIMES = 20
LATE = "it had no CPU for most of its time"
JUDGE_S = 2.0  # of a judge for its verdict on a program that was killed
EXIT_S = 0.5  # for a program that ends by itself to say how


class SandboxServer:
    """The parent's settings, and the resources prepared for every fork."""

    def __init__(self, settings: dict[str, Any], link: socket.socket) -> None:
        self._link = link
        self._limits = settings["limits"]
        self._folder = settings["folder"]
        self._mounts = "tmpfs" in settings["layers"]
        self._inside = self._folder  # where the programs' folder is for this process
        if self._mounts:
            own_mounts()
            self._inside = make_root(self._folder, settings["packages"].values())
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # which other credentials may undo
        # without either it could write to files of the machine
        files = self._mounts or "landlock" in settings["layers"]
        limits = {
            "RLIMIT_AS": self._limits["memory_mib"] << 20,
            "RLIMIT_CPU": math.ceil(self._limits["timeout_s"]) + 2,
            "RLIMIT_FSIZE": self._limits["file_mib"] << 20 if files else 0,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
        }
        self._names, self._nodes = program.prepare(settings)
        self._confinement = Confinement(
            settings["layers"],
            limits,
            folder=self._inside if self._mounts else None,
            packages=settings["packages"],
        )
        os.environ.update(HOME=self._folder, TMPDIR=self._folder)
        # A collection in a fork leaves frozen objects alone, so that their pages stay shared.
        gc.collect()
        gc.freeze()

    def names(self) -> list[str]:
        """Names that the preamble defines."""
        return sorted(n for n in self._names if not n.startswith("__"))

    def run(self, channel: int, numpy: bool, judge: int, scripted: bool) -> dict[str, Any]:
        """Run one program until the parent says that it was judged.

        channel: a socket to the judge, whose process number is `judge`. scripted: the program has a
        process for every input (see `script`). Returns {"limit": exceeded, "ended": how the program
        ended by itself, "output"}.
        """
        if numpy and "numpy" not in sys.modules:
            program.import_numpy({})
            gc.freeze()
        self._mount()
        output, output_end = os.pipe()
        tally = Tally() if scripted else None
        try:
            try:
                pid = self._fork(output_end, channel, tally)
            finally:
                os.close(output_end)
                os.close(channel)
            limit, text = self._watch(output, Clock(pid, judge, tally))
            if limit:  # the judge sees its end
                os.kill(pid, signal.SIGKILL)
                if not _readable(self._link, JUDGE_S):  # it is busy with the program's data
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(judge, signal.SIGKILL)
            verdict, _ = receive_line(self._link, 0)
            judged_end = verdict is not None and verdict["ended"]
            how, cpu_s = _end(pid, EXIT_S if judged_end else 0.0)
            if cpu_s > self._limits["timeout_s"]:
                limit = limit or self._time_limit()
            os.set_blocking(output, False)
            with contextlib.suppress(BlockingIOError):
                text += os.read(output, 1 << 16)
        finally:
            os.close(output)
            if tally is not None:
                tally.close()
            if self._mounts:
                unmount(self._inside)
        shown = text.decode(errors="replace")[-SHOWN:]
        # a program also ends when its judge has ended, which is not its fault
        return {"limit": limit, "ended": how if judged_end else "", "output": shown}

    def _mount(self) -> None:
        if self._mounts:
            mount_tmpfs(self._inside, self._limits["file_mib"], MAX_FILES)

    def _fork(self, output: int, channel: int, tally: Tally | None) -> int:
        """A confined process that runs a program, or with a tally a runner of such processes, that
        never returns here; its number."""
        server = os.getpid()
        rules = self._confinement.rules()
        pid = os.fork()
        if pid:
            if rules is not None:
                os.close(rules)
            return pid
        try:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:  # it died before the signal was asked for
                os._exit(1)
            kept = {} if rules is None else {RULES_FD: rules}
            # opened here: a lock on a description that others share would outlive the program
            null = os.open("/dev/null", os.O_RDONLY)
            _keep({0: null, 1: output, 2: output, CHANNEL_FD: channel, **kept})
            if tally is not None:
                at = self._inside if self._mounts else None
                folder = script.Folder(at, self._folder, self._renew)
                script.main(Channel(CHANNEL_FD), folder, tally, self._enter)
            self._enter()
            program.main(Channel(CHANNEL_FD), self._names, self._nodes)
        except BaseException:  # it must not go on as a second server
            traceback.print_exc()
        finally:
            os._exit(1)

    def _enter(self) -> None:
        """Confine this process for good, in its folder."""
        if self._mounts:
            os.chroot(self._folder)
        os.chdir(self._folder)
        sys.set_int_max_str_digits(0)
        self._confinement.apply(RULES_FD if self._confinement.has_rules else None)

    def _renew(self) -> None:
        """Empty the folder of a runner's program, whatever is in it."""
        unmount(self._inside)
        self._mount()
        rules = self._confinement.rules()  # they name a folder by its file system
        if rules is not None:
            os.dup2(rules, RULES_FD)
            os.close(rules)

    def _watch(self, output: int, clock: Clock) -> tuple[str, bytes]:
        """Follow a program until the parent has a verdict: (limit exceeded or "", output)."""
        text = b""
        looked = time.monotonic()
        waiting = select.poll()  # `select` takes no descriptor above 1023
        for source in (self._link.fileno(), output):
            waiting.register(source, select.POLLIN)
        while True:
            if time.monotonic() - looked >= POLL_S:
                looked = time.monotonic()
                if limit := self._exceeded(clock):
                    return limit, text
            ready = [source for source, _ in waiting.poll(1000 * POLL_S)]
            if output in ready:
                data = os.read(output, 1 << 16)
                if not data:
                    waiting.unregister(output)
                text += data
                if len(text) > self._limits["output_kib"] << 10:
                    return f"more than {self._limits['output_kib']} KiB of output", text
            elif ready:
                return "", text

    def _exceeded(self, clock: Clock) -> str:
        if clock.charged() > self._limits["timeout_s"]:
            return self._time_limit()
        if clock.wall() > WALL_TIMES * self._limits["timeout_s"]:
            return LATE
        return f"more than {MAX_THREADS} threads" if _threads(clock.running()) > MAX_THREADS else ""

    def _time_limit(self) -> str:
        return f"time limit of {self._limits['timeout_s']:g} s"


def _readable(link: socket.socket, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(link, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


def _keep(wanted: dict[int, int]) -> None:
    """Give this process exactly these descriptors, by target."""
    # they are moved above all of them first, so that none is overwritten on its way
    above = 1 + max(*wanted, *wanted.values())
    for place, fd in enumerate(wanted.values(), above):
        os.dup2(fd, place)
    for place, target in enumerate(wanted, above):
        os.dup2(place, target)
    # The server's link to the parent has the number that it had there, which may be any.
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in wanted:
            with contextlib.suppress(OSError):  # the listing's own is closed by now
                os.close(fd)


def _end(pid: int, patience_s: float) -> tuple[str, float]:
    """End a program: how it had ended by itself before, "" if it had not; its CPU seconds."""
    deadline = time.monotonic() + patience_s
    while not (found := os.wait4(pid, os.WNOHANG))[0]:
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            used = os.wait4(pid, 0)[2]
            return "", used.ru_utime + used.ru_stime
        time.sleep(0.001)
    code, cpu_s = os.waitstatus_to_exitcode(found[1]), found[2].ru_utime + found[2].ru_stime
    if code < 0:
        return f"killed by {signal.Signals(-code).name}", cpu_s
    return f"exit code {code} before the end of its tests", cpu_s


def _threads(pid: int) -> int:
    """Threads of a child that has not been waited for, which may have ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def main(fd: int) -> None:
    """Run programs, one at a time, until the parent closes the socket."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    link = socket.socket(fileno=fd)
    settings, _ = receive_line(link, 0)
    try:
        server = SandboxServer(settings, link)
        answer: dict[str, Any] = {"names": server.names()}
    except OSError as error:
        answer = {"fault": str(error)}
    send_line(fd, answer)
    while "fault" not in answer:
        request, fds = receive_line(link, 1)
        if request is None:
            return
        try:
            answer = server.run(fds[0], **request)
        except OSError as error:
            answer = {"fault": str(error)}
        send_line(fd, answer)
