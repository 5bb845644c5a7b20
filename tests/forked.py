"""Processes of tests, forked from one server that has imported what they need.

The imports of an engine or a rank take 6 to 12 s of processor time, a fork of a process that has
them a few milliseconds. The server is that of Python's multiprocessing: it starts with the first
process, imports tests/warm_imports.py, and ends with this process.

    process = forked.context().Process(target=function, args=(...))
    text = forked.call(function, ..., seconds=100)
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from timing import charge, deadline

WARM = "warm_imports"


class Forked(ForkServerProcess):
    """A process with the environment of its parent, as one that is spawned has."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        made = getattr(sys.modules.get(WARM), "MADE", {})
        os.environ.clear()
        os.environ.update(made | self._environment)
        if threads := os.environ.get("OMP_NUM_THREADS"):  # torch has read the server's
            import torch

            torch.set_num_threads(int(threads))
        super().run()


class _Context(ForkServerContext):
    Process: Any = Forked


def context() -> ForkServerContext:
    """Of multiprocessing, whose processes are forks of the server."""
    made = _Context()
    made.set_forkserver_preload([WARM])
    with pytest.MonkeyPatch.context() as patch:  # the server has no other way to find it
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()
    return made


def call(function: Callable[..., Any], *args: Any, seconds: float) -> str:
    """Call a module's function in a process of its own; what that prints.

    Raises AssertionError, with the end of what was printed, unless it returns 0 or None within
    `deadline(seconds)`.
    """
    with tempfile.NamedTemporaryFile() as log:
        own = context()
        ours, theirs = own.Pipe(duplex=False)
        process = own.Process(target=_called, args=(theirs, log.name, function, args))
        process.start()
        theirs.close()
        process.join(deadline(seconds))
        if process.exitcode is None:
            process.kill()
            process.join()
        text = Path(log.name).read_text(errors="replace")
        if ours.poll():
            charge(ours.recv())
        assert process.exitcode == 0, f"exit code {process.exitcode}:\n{text[-4000:]}"
        return text


def _called(pipe: Any, log: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        code = function(*args)
    finally:
        pipe.send(used_cpu_s())
    sys.exit(code)


def used_cpu_s() -> float:
    """Processor seconds of this process and of its children that have ended: what a process that is
    no child of the test's tells it, for `timing.charge`."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
