"""Shared by all faults: their registry, signals to processes, and the outcomes of a recovery and a
resume."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.faults.job import Job, environment, line_with


@dataclass(slots=True)
class Outcome:
    """The outcome of one fault."""

    saw: str  # the line of the log that reports it
    seconds: float | None = None
    notes: list[str] = field(default_factory=list)


def recovers(job: Job, inject: Callable[[], None], *words: str) -> Outcome:
    """Inject, wait for a log line with all `words`, then for two more steps."""
    job.wait(lambda: job.steps() >= 6, "six steps")
    before = len(job.text())
    begun = time.monotonic()
    inject()
    job.wait(lambda: line_with(job.text()[before:], *words), f"a line with {words}")
    rows = job.run_dir / "metrics.jsonl"
    time.sleep(0.2)
    size = rows.stat().st_size
    at = [job.steps()]

    def moved() -> bool:
        nonlocal size
        if rows.stat().st_size < size:  # a recovery removed rows
            size, at[0] = rows.stat().st_size, job.steps()
        return job.steps() >= at[0] + 2

    job.wait(moved, "further steps")
    return Outcome(line_with(job.text()[before:], *words), time.monotonic() - begun)


class JoinedHead:
    """Ray started on this machine beforehand, as on a cluster, for a run to join. Ends with the
    jobs."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.address = f"127.0.0.1:{self._port}"
        self._folder = folder
        self._log = folder / "head"
        self._sessions = tempfile.mkdtemp(prefix="ray-")  # sockets: their paths must be short
        os.environ["RAY_AUTH_MODE"] = "disabled"  # of the run, too
        Job.afterwards.append(self._close)
        self.start()

    def start(self) -> None:
        """Returns once its port is open."""
        words = ["start", "--head", "--block", "--node-ip-address=127.0.0.1"]
        words += [f"--port={self._port}"]
        words += ["--num-cpus=2", f"--object-store-memory={2**27}", "--include-dashboard=false"]
        self._process = subprocess.Popen(
            [str(Path(sys.executable).parent / "ray"), *words, f"--temp-dir={self._sessions}"],
            stdout=self._log.open("a"),
            stderr=subprocess.STDOUT,
            env=environment(self._folder),  # of the processes of runs on it
            start_new_session=True,
        )
        until = time.monotonic() + Job.patience_s
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"Ray's head did not start: {self._log.read_text()[-2000:]}")
            time.sleep(0.2)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def stop(self) -> None:
        """End the head with its node, and all that the node has started."""
        family = self._family()
        self._process.terminate()
        _, alive = psutil.wait_procs(family, timeout=20)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(20)

    def roles(self) -> set[psutil.Process]:
        """The processes of runs that are there now."""
        found = set()
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "Actor" in " ".join(process.cmdline()):
                    found.add(process)
        return found

    def _family(self) -> list[psutil.Process]:
        process = psutil.Process(self._process.pid)
        return [*process.children(recursive=True), process]

    def _close(self) -> None:
        if self._process.poll() is None:
            self.stop()
        os.environ.pop("RAY_AUTH_MODE", None)
        shutil.rmtree(self._sessions, ignore_errors=True)


Scenario = Callable[[Path], tuple[Job, Outcome]]  # folder -> the job, still running, and outcome
FAULTS: dict[str, tuple[str, Scenario]] = {}  # function name -> (title of its row, scenario)


def fault(
    title: str,
) -> Callable[[Scenario], Scenario]:
    """Register a scenario under its function name and the title of its row."""

    def register(run: Scenario) -> Scenario:
        FAULTS[run.__name__] = (title, run)
        return run

    return register


def kill(job: Job, word: str, number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """An injection: signal the newest process whose command line contains `word`."""

    def inject() -> None:
        job.find(word)[-1].send_signal(number)

    return inject


def resumed(folder: Path, *words: str) -> tuple[Job, Outcome]:
    """Resume the run of `folder` and wait for two more steps; reports the line with `words`."""
    begun = time.monotonic()
    before = len((folder / "log").read_text(errors="replace"))
    job = Job(folder)
    job.wait(lambda: line_with(job.text()[before:], "continuing from"), "the run to continue")
    at = job.steps()
    job.wait(lambda: job.steps() >= at + 2, "further steps")
    return job, Outcome(
        line_with(job.text()[before:], *(words or ("continuing from",))), time.monotonic() - begun
    )
