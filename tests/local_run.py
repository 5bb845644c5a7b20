"""Whole runs without Ray and without imports: `rlcore` commands as forks of a warm process.

The warm process is a fork of the server of tests/forked.py: it has imported what a driver, an
engine and a learner rank import, and has computed nothing. Each command is a fork of it, a process
group of its own with its output in a file, in which tests/local_cluster.py stands in for Ray; all
else is the real program.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import forked
import timing


@dataclass(frozen=True, slots=True)
class Words:
    """A command."""

    words: Sequence[str]
    log: str  # file
    environment: dict[str, str]
    folder: str
    root: str  # for sockets
    umask: int


class LocalProcess:
    """A command that was forked; the part of subprocess.Popen that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float) -> int:
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired("rlcore", timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if not self.ended.is_set():
            os.kill(self.pid, number)


class WarmProcess:
    """Forks `rlcore` commands. Its start takes as long as all imports."""

    def __init__(self) -> None:
        self._root = tempfile.TemporaryDirectory(prefix="rlcore-")
        context = forked.context()
        self._link, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,))
        self._process.start()
        theirs.close()
        self._commands: dict[int, LocalProcess] = {}
        self._started = threading.Semaphore(0)
        self._last: LocalProcess | None = None
        threading.Thread(target=self._receive, daemon=True).start()

    def start(self, words: Sequence[str], log: Path) -> LocalProcess:
        environment = {**os.environ, "COLUMNS": "200"}
        os.umask(mask := os.umask(0))
        self._link.send(Words(words, str(log), environment, os.getcwd(), self._root.name, mask))
        assert self._started.acquire(timeout=timing.deadline(300)), "the warm process did not start"
        assert self._last is not None, "the warm process has ended"
        return self._last

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                pid, code, cpu_s = self._link.recv()
                if code is None:
                    self._last = self._commands[pid] = LocalProcess(pid)
                    self._started.release()
                else:
                    command = self._commands.pop(pid)
                    timing.charge(cpu_s)
                    command.returncode = code
                    command.ended.set()
        self._last = None
        self._started.release()

    def close(self) -> None:
        """End it, and what runs of its commands."""
        # closing alone would not wake the thread that reads, nor the process
        with socket.socket(fileno=os.dup(self._link.fileno())) as link:
            link.shutdown(socket.SHUT_RDWR)
        self._process.join(timing.deadline(30))
        assert self._process.exitcode == 0, "the warm process did not end"
        self._root.cleanup()


def serve(control: Connection) -> None:
    """The warm process, and each of its commands."""
    from local_cluster import Forking, put_in_place, title
    from warm_imports import MADE

    class Commands(Forking):
        def died(self, pid: int, code: int, cpu_s: float) -> None:
            self.control.send((pid, code, cpu_s))

    title("rlcore: warm process")
    command = Commands(control).requests()
    os.setsid()
    os.environ.clear()
    os.environ.update(MADE | command.environment)
    os.chdir(command.folder)
    os.umask(command.umask)
    output = os.open(command.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    title(f"rlcore {' '.join(command.words)}")
    driver = put_in_place(command.root, f"{command.log}.actors")
    sys.argv = ["rlcore", *command.words]
    from rlcore import cli

    try:
        sys.exit(cli.main(list(command.words)))
    finally:
        driver.close()
