"""Processes that are forked from one with all imports: the runs of a sweep on one machine's CPUs,
and the workers of their Ray. Imports take half of a short run.

`Nursery` starts the server, `python -m rlcore.cluster.warm SOCKET MODULE ...`. The script
`warm.py SOCKET WORD ...` asks it for a fork that does what `python WORD ...` would. The fork has
the script's files, folder and environment; the script passes signals on, and has its exit code.
Without a server the script becomes `python WORD ...` itself.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WARM = "RLCORE_WARM"  # as in specs.py, which a script cannot import
PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
NUMBER = 8  # bytes of a process id or exit code
START_S, END_S = 300.0, 60.0


class Nursery:
    """A server of forks for the duration of a block, in which `python_words` name it."""

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        """`folder`: of the socket. `modules`: what forks have imported, in this order."""
        self._path = str(folder / "warm")
        self._modules = modules

    def __enter__(self) -> Nursery:
        words = [sys.executable, "-m", "rlcore.cluster.warm", self._path, *self._modules]
        self._server = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | {"DS_ACCELERATOR": "cpu"},
        )
        assert self._server.stdout is not None
        try:
            # it listens, has ended, or is late: without a server each script is python itself
            select.select([self._server.stdout], [], [], START_S)
        except BaseException:  # stopped meanwhile
            self._server.kill()
            self._server.communicate()
            raise
        os.environ[WARM] = self._path
        return self

    def __exit__(self, *error: object) -> None:
        del os.environ[WARM]
        try:
            self._server.communicate(timeout=END_S)  # the end of its input: after its last fork
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.communicate()


# ---- the process that stands for a fork ----------------------------------------------------------


def stand_for(path: str, words: Sequence[str]) -> int:
    """Have `python WORD ...` done by a fork; its exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED)  # kept until there is a fork to pass them to
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        socket.send_fds(connection, [b"0"], [0, 1, 2])
        request = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
        connection.sendall(json.dumps(request).encode())
        connection.shutdown(socket.SHUT_WR)
        pid = int.from_bytes(connection.recv(NUMBER), signed=True)
    except OSError:
        pid = 0
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED)
        os.execv(sys.executable, [sys.executable, *words])

    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in PASSED:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED)
    code = int.from_bytes(connection.recv(NUMBER) or b"\x01", signed=True)
    if code < 0:  # a signal ended it
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


# ---- the server ----------------------------------------------------------------------------------


class Server:
    """Forks on request. It starts no threads, and ends with its input and its last fork."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._ready = select.poll()
        for file in (0, self._listener.fileno()):
            self._ready.register(file, select.POLLIN)
        self._forks: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the process
        self._asking: dict[int, int] = {}  # connection -> process id

    def requests(self) -> dict[str, Any] | None:
        """In every fork its request; in the server None, at its end."""
        input_open = True
        while input_open or self._forks:
            for file, _ in self._ready.poll():
                if file == 0:
                    self._ready.unregister(0)
                    input_open = False
                elif file in self._forks:
                    self._bury(file)
                elif file in self._asking:  # who stands for it was killed
                    os.kill(self._asking[file], signal.SIGKILL)
                    self._ready.unregister(file)
                elif file == self._listener.fileno() and (request := self._fork()):
                    return request
        return None

    def _fork(self) -> dict[str, Any] | None:
        asking, _ = self._listener.accept()
        _, files, _, _ = socket.recv_fds(asking, 1, 3)
        request = dict(json.loads(b"".join(iter(lambda: asking.recv(1 << 16), b""))))
        pid = os.fork()
        if pid == 0:
            for other in (self._listener, asking, *(one for _, one in self._forks.values())):
                other.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
        for file in files:
            os.close(file)
        if pid == 0:
            return request
        process = os.pidfd_open(pid)
        self._forks[process] = pid, asking
        self._asking[asking.fileno()] = pid
        self._ready.register(process, select.POLLIN)
        self._ready.register(asking, 0)  # its other end is closed
        asking.sendall(pid.to_bytes(NUMBER, signed=True))
        return None

    def _bury(self, process: int) -> None:
        self._ready.unregister(process)
        os.close(process)
        pid, asking = self._forks.pop(process)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(KeyError):
            self._ready.unregister(asking)
        del self._asking[asking.fileno()]
        with contextlib.suppress(OSError):  # who stood for it was killed
            asking.sendall(code.to_bytes(NUMBER, signed=True))
        asking.close()


def serve(path: str, modules: Sequence[str]) -> None:
    """Import the modules, then fork on request; in a fork, be the process that was asked for."""
    before = dict(os.environ)
    # Ray reads its environment once, when it is imported: each fork imports it. vLLM does without.
    absent: Any = None
    sys.modules.setdefault("ray", absent)
    for module in modules:
        importlib.import_module(module)
    del sys.modules["ray"]
    made = {name: value for name, value in os.environ.items() if before.get(name) != value}
    # a process finds the memory of its title by the environment, which its forks replace
    importlib.import_module("setproctitle").setproctitle("rlcore: warm imports")
    server = Server(path)
    gc.collect()
    gc.freeze()
    os.write(1, b"1")
    if (request := server.requests()) is not None:
        os.environ.clear()
        os.environ.update(made | request["environment"])
        _become(request)


def _become(request: Mapping[str, Any]) -> None:
    os.setsid()
    os.chdir(request["folder"])
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    words = request["words"]
    if words[0].endswith("setup_worker.py"):
        words = _without_setup(words)
        importlib.import_module("rlcore.cluster.ray_cluster").follow_threads()
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")


def _without_setup(words: list[str]) -> list[str]:
    """The words of a worker of Ray, without the process that sets its environment."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    known, rest = parser.parse_known_args(words[1:])
    context = json.loads(known.serialized_runtime_env_context or "{}")
    if any(value for name, value in context.items() if name not in ("env_vars", "py_executable")):
        os.execv(sys.executable, [sys.executable, *words])
    os.environ.update(context.get("env_vars", {}))
    return rest


if __name__ == "__main__":
    if __package__:
        serve(sys.argv[1], sys.argv[2:])
    else:
        sys.exit(stand_for(sys.argv[1], sys.argv[2:]))
