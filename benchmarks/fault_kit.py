"""What every fault is made of: the register of them, a signal to a process, recovery and resumption as outcomes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from job import Job, line_with


@dataclass(slots=True)
class Outcome:
    """What a fault came to."""

    saw: str  # the line the user saw
    seconds: float | None = None
    notes: list[str] = field(default_factory=list)


def recovers(job: Job, inject: Callable[[], None], *words: str) -> Outcome:
    """Inject, wait for the line with `words`, then for two further steps."""
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
        if rows.stat().st_size < size:  # a recovery took rows back
            size, at[0] = rows.stat().st_size, job.steps()
        return job.steps() >= at[0] + 2

    job.wait(moved, "further steps")
    return Outcome(line_with(job.text()[before:], *words), time.monotonic() - begun)


FAULTS: dict[str, tuple[str, Callable[[Path], tuple[Job, Outcome]]]] = {}


def fault(title: str) -> Callable[[Callable[[Path], tuple[Job, Outcome]]], Callable[[Path], tuple[Job, Outcome]]]:
    def register(run: Callable[[Path], tuple[Job, Outcome]]) -> Callable[[Path], tuple[Job, Outcome]]:
        FAULTS[run.__name__] = (title, run)
        return run

    return register


def kill(job: Job, word: str, number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    def inject() -> None:
        job.find(word)[-1].send_signal(number)

    return inject


def resumed(folder: Path, *words: str) -> tuple[Job, Outcome]:
    begun = time.monotonic()
    before = len((folder / "log").read_text(errors="replace"))
    job = Job(folder)
    job.wait(lambda: line_with(job.text()[before:], "continuing from"), "the run to continue")
    at = job.steps()
    job.wait(lambda: job.steps() >= at + 2, "further steps")
    return job, Outcome(line_with(job.text()[before:], *(words or ("continuing from",))), time.monotonic() - begun)
