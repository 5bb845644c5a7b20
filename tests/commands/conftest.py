"""Whole runs by the command: real engines, graders and DeepSpeed ranks, short ones on the smallest
model.

`command` starts them as forks of a process that has their imports, without Ray
(tests/local_run.py); `installed` starts the installed program, with Ray.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from local_run import WarmProcess
from timing import deadline, wait_until

from rlcore.metrics.rows import run_rows

SMALL = (
    "experiment=quickstart",
    "model.fresh.hidden_size=64",
    "model.fresh.layers=2",
    "model.fresh.intermediate_size=192",
    # Enough for mixed rewards, so that every step has a gradient.
    "model.warmup.steps=60",
    "model.warmup.batch_size=64",
    "task.args.min_digits=2",
    "task.args.max_digits=3",
    "schedule.groups_per_step=8",
    "rollout.samples_per_prompt=4",
    "evaluation.prompts=8",
    "evaluation.every=2",
    "logging.wandb=disabled",
    "cluster.object_store_mib=128",
)
# What depends on the clock, or on where a run was stopped, and on nothing else.
TIMES = ("time/", "throughput/", "buffer/bytes", "checkpoint/")
# Seconds on the reference machine, quiet; `timing.deadline` scales them.
RUN_S = 300.0
EVENT_S = 200.0
END_S = 20.0  # of a process that has been told to end


class Command:
    """A running `rlcore` command in a process group of its own."""

    def __init__(self, process, log: Path) -> None:
        self.process = process
        self.log = log

    def wait(self, seconds: float = RUN_S) -> int:
        return self.process.wait(deadline(seconds))

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def descendants(self):
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def wait_for(
        self, condition, seconds: float = EVENT_S, what: str = "a condition", every_s: float = 0.1
    ) -> None:
        def holds() -> bool:
            ended = self.process.poll() is not None
            if condition():
                return True
            assert not ended, f"the command ended while waiting for {what}:\n{self.text[-3000:]}"
            return False

        wait_until(holds, seconds, what, every_s)

    def kill(self) -> None:
        for child in [*self.descendants(), self.process]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                child.send_signal(signal.SIGKILL)


def as_installed(words, log: Path, under=()) -> subprocess.Popen:
    """Start the program that users start. `under`: the words of one that it is started by."""
    with log.open("w") as out:
        return subprocess.Popen(
            [*under, str(Path(sys.executable).parent / "rlcore"), *words],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "200"},
        )


@contextlib.contextmanager
def started_in(folder: Path, start):
    """A function that starts `rlcore` commands; whatever remains of them is killed at the end."""
    started = []

    def begin(*words, **more):
        log = folder / f"command{len(started)}.log"
        started.append(Command(start(words, log, **more), log))
        return started[-1]

    yield begin
    for c in started:
        c.kill()


@pytest.fixture(scope="session")
def warm_process():
    """What forks whole runs, for all tests of the session."""
    process = WarmProcess()
    yield process
    process.close()


@pytest.fixture
def command(warm_process, tmp_path):
    """Start commands of one test, without Ray."""
    with started_in(tmp_path, warm_process.start) as start:
        yield start


@pytest.fixture
def installed(tmp_path):
    """Start commands of one test as a user does, with Ray."""
    with started_in(tmp_path, as_installed) as start:
        yield start


@pytest.fixture(scope="module")
def finished(warm_process, tmp_path_factory):
    """Run a command without Ray, for the tests of a module to read what it left; raises unless it
    ends well."""
    with started_in(tmp_path_factory.mktemp("finished"), warm_process.start) as start:

        def finish(*words):
            run = start(*words)
            assert run.wait() == 0, run.text[-3000:]
            return run

        yield finish


@contextlib.contextmanager
def umask(mask):
    """Commands that are started meanwhile have this umask."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(*folders):
    """Modes of the files below folders."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {stat.S_IMODE(path.stat().st_mode) for path in files}


@pytest.fixture(scope="session")
def warm_cache(tmp_path_factory):
    """One cache of warmed-up models for every run of the session."""
    return tmp_path_factory.mktemp("warm")


@pytest.fixture(scope="session")
def small(warm_cache):
    """Words of a run that takes seconds once its processes are up."""
    return (*SMALL, f"model.warmup.cache_dir={warm_cache}")


def rows(run_dir: Path):
    """The rows so far, with all columns, which may be written to meanwhile."""
    return run_rows(run_dir)


def without_times(row):
    """A row as far as it must not depend on the clock."""
    return {k: v for k, v in row.items() if not _timed(k)}


def _timed(key: str) -> bool:
    # An engine's measured costs come once it has measured enough of them.
    return key.startswith(TIMES) or (key.startswith("engine/") and key.endswith("_s"))


def left_over(processes):
    """Those of `processes` that are still alive after a grace period."""
    _, alive = psutil.wait_procs(processes, timeout=deadline(END_S))
    return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
