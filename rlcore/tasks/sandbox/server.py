"""The server of a sandbox: `main(fd)` in a Python of its own, started by `helper`.

Standard library only, isolated (-I -S): no secrets, no environment, no third-party package unless a
program needs one. Every program is a fork of it, confined. It never sees a program or its tests:
those go from the parent to the judge, and from there the program to its process. So nothing of them
is in the memory that a program starts with.

The server watches the clock, the output, the threads and the folder, and kills what exceeds them.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any

from . import program
from .confinement import LIBC, PR_SET_PDEATHSIG, Confinement
from .values import Channel, receive_line, send_line

CHANNEL_FD = 3
RULES_FD = 4
POLL_S = 0.05
MAX_FILES = 1000
MAX_THREADS = 64
SHOWN = 2000  # characters of the output that are reported
REMOVE_S = 60.0
EXIT_S = 0.5  # for a program that ends by itself to say how


class SandboxServer:
    """Settings of the parent, and what every fork finds prepared."""

    def __init__(self, settings: dict[str, Any], link: socket.socket) -> None:
        self._link = link
        self._limits = settings["limits"]
        self._folder = settings["folder"]
        limits = {
            "RLIMIT_AS": self._limits["memory_mib"] << 20,
            "RLIMIT_CPU": int(self._limits["timeout_s"]) + 2,
            "RLIMIT_FSIZE": self._limits["file_mib"] << 20,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
        }
        self._names, self._nodes = program.prepare(settings)
        self._confinement = Confinement(
            settings["layers"], limits, folder=self._folder, packages=settings["packages"]
        )
        self._null = os.open("/dev/null", os.O_RDONLY)
        os.environ.update(HOME=self._folder, TMPDIR=self._folder)
        tempfile.tempdir = self._folder
        # What is frozen is left alone by a collection in a fork, so that its pages stay shared.
        gc.collect()
        gc.freeze()

    def names(self) -> list[str]:
        """Names that the preamble defines."""
        return sorted(n for n in self._names if not n.startswith("__"))

    def run(self, channel: int, numpy: bool) -> dict[str, Any]:
        """Run one program until the parent says that it was judged.

        channel: a socket to the judge. Returns {"limit": exceeded, "ended": how the program ended
        by itself, "output"}.
        """
        if numpy and "numpy" not in sys.modules:
            program.import_numpy({})
            gc.freeze()
        deadline = time.monotonic() + self._limits["timeout_s"]
        output, output_end = os.pipe()
        try:
            try:
                pid = self._fork(output_end, channel)
            finally:
                os.close(output_end)
                os.close(channel)
            limit, text = self._watch(pid, output, deadline)
            if limit:  # the judge sees its end
                os.kill(pid, signal.SIGKILL)
            verdict, _ = receive_line(self._link, 0)
            judged_end = verdict is not None and verdict["ended"]
            how = _end(pid, EXIT_S if judged_end else 0.0)
            os.set_blocking(output, False)
            with contextlib.suppress(BlockingIOError):
                text += os.read(output, 1 << 16)
        finally:
            os.close(output)
            _empty(self._folder)
        shown = text.decode(errors="replace")[-SHOWN:]
        # a program also ends because its judge has: that says nothing about it
        return {"limit": limit, "ended": how if judged_end else "", "output": shown}

    def _fork(self, output: int, channel: int) -> int:
        """A confined process that runs a program and never returns here; its number."""
        server = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:  # it died before the signal was asked for
                os._exit(1)
            rules = self._confinement.rules
            kept = {} if rules is None else {RULES_FD: rules}
            _keep({0: self._null, 1: output, 2: output, CHANNEL_FD: channel, **kept})
            os.chdir(self._folder)
            sys.set_int_max_str_digits(0)
            self._confinement.apply(RULES_FD if kept else None)
            program.main(Channel(CHANNEL_FD), self._names, self._nodes)
        except BaseException:  # it must not go on as a second server
            traceback.print_exc()
        finally:
            os._exit(1)

    def _watch(self, pid: int, output: int, deadline: float) -> tuple[str, bytes]:
        """Follow a program until the parent has a verdict: (limit exceeded or "", output)."""
        text = b""
        looked = time.monotonic()
        waiting: list[Any] = [self._link, output]
        while (now := time.monotonic()) < deadline:
            if now - looked >= POLL_S:
                looked = now
                if limit := self._exceeded(pid):
                    return limit, text
            ready = select.select(waiting, [], [], min(POLL_S, deadline - now))[0]
            if output in ready:
                data = os.read(output, 1 << 16)
                if not data:
                    waiting.remove(output)
                text += data
                if len(text) > self._limits["output_kib"] << 10:
                    return f"more than {self._limits['output_kib']} KiB of output", text
            elif ready:
                return "", text
        return f"time limit of {self._limits['timeout_s']:g} s", text

    def _exceeded(self, pid: int) -> str:
        mib = self._limits["file_mib"]
        if _oversized(self._folder, mib << 20):
            return f"more than {mib} MiB or {MAX_FILES} of files"
        return f"more than {MAX_THREADS} threads" if _threads(pid) > MAX_THREADS else ""


def _keep(wanted: dict[int, int]) -> None:
    """Give this process these descriptors, by target, and no others."""
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


def _end(pid: int, patience_s: float) -> str:
    """End a program: how it had ended by itself before, "" if it had not."""
    deadline = time.monotonic() + patience_s
    while not (found := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return ""
        time.sleep(0.001)
    code = os.waitstatus_to_exitcode(found[1])
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code} before the end of its tests"


def _threads(pid: int) -> int:
    """Of a child that has not been waited for, which may have ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _oversized(folder: str, limit: int) -> bool:
    """More than `limit` bytes on disk or MAX_FILES entries; looks no further than it must."""
    total = entries = 0
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as found:
                for entry in found:
                    entries += 1
                    status = entry.stat(follow_symlinks=False)
                    total += status.st_blocks * 512
                    if total > limit or entries > MAX_FILES:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except FileNotFoundError:  # the program removed it meanwhile
            continue
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return True
            raise
    return False


def _empty(folder: str) -> None:
    """Remove what a program left. The folder itself stays: the file rules name its inode."""
    for entry in list(os.scandir(folder)):
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.path)
            continue
        with contextlib.suppress(RecursionError):
            shutil.rmtree(entry.path, ignore_errors=True)
        if os.path.exists(entry.path):  # nested deeper than Python's own removal goes
            subprocess.run(["/bin/rm", "-rf", "--", entry.path], check=True, timeout=REMOVE_S)


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
            answer = server.run(fds[0], request["numpy"])
        except OSError as error:
            answer = {"fault": str(error)}
        send_line(fd, answer)
