"""Shared by all faults: their registry, signals to processes, and the outcomes of a recovery and a
resume."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from job import Job, line_with


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
