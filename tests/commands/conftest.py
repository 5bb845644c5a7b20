"""Whole runs by the command, on real Ray, vLLM and DeepSpeed processes; short ones on the smallest
model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

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


class Command:
    """A running `rlcore` command in a process group of its own."""

    def __init__(self, words, log: Path, under=()) -> None:
        self.log = log
        self._out = log.open("w")
        self.process = subprocess.Popen(
            [*under, str(Path(sys.executable).parent / "rlcore"), *words],
            stdout=self._out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "200"},
        )

    def wait(self, timeout_s: float = 600) -> int:
        try:
            return self.process.wait(timeout_s)
        finally:
            self._out.close()

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def descendants(self):
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def wait_for(
        self, condition, timeout_s: float = 400, what: str = "a condition", every_s: float = 0.2
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, (
                f"the command ended while waiting for {what}:\n{self.text[-3000:]}"
            )
            assert time.monotonic() < deadline, (
                f"waited {timeout_s} s for {what}:\n{self.text[-3000:]}"
            )
            time.sleep(every_s)

    def kill(self) -> None:
        for child in [*self.descendants(), self.process]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                child.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def started_in(folder: Path):
    """A function that starts `rlcore` commands; whatever remains of them is killed at the end.

    `under`: the words of a program that the command is started by.
    """
    started = []

    def start(*words, under=()):
        started.append(Command(words, folder / f"command{len(started)}.log", under))
        return started[-1]

    yield start
    for c in started:
        c.kill()


@pytest.fixture
def command(tmp_path):
    """Start commands of one test (`started_in`)."""
    with started_in(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Run a command, for the tests of a module to read what it left; raises unless it ends well."""
    with started_in(tmp_path_factory.mktemp("finished")) as start:

        def finish(*words):
            run = start(*words)
            assert run.wait() == 0, run.text[-3000:]
            return run

        yield finish


@pytest.fixture(scope="session")
def warm_cache(tmp_path_factory):
    """One cache of warmed-up models for every run of the session."""
    return tmp_path_factory.mktemp("warm")


@pytest.fixture(scope="session")
def small(warm_cache):
    """Words of a run that takes seconds once its processes are up."""
    return (*SMALL, f"model.warmup.cache_dir={warm_cache}")


def rows(run_dir: Path):
    """metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def without_times(row):
    """A row as far as it must not depend on the clock."""
    return {k: v for k, v in row.items() if not k.startswith(TIMES)}


def left_over(processes, timeout_s: float = 20.0):
    """Those of `processes` that are still alive after a grace period."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
