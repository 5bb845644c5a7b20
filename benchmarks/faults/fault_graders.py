"""Faults of graders: each fails on about one response in sixty; the run continues without those."""

from __future__ import annotations

from pathlib import Path

from benchmarks.faults.fault_kit import Outcome, fault
from benchmarks.faults.job import Job
from benchmarks.harness import read_rows

BODIES = {
    "raises": "raise RuntimeError('the grader cannot judge this')",
    "hangs": "time.sleep(10**6)",
    "leaks": "self.hold = []\n            while True: self.hold.append(bytearray(10**7))",
    "prints": "while True: print('x' * 1000)",
}
GRADER = """
import time, zlib
from rlcore.tasks.digits import Digits

class Bad(Digits):
    def __init__(self, *, min_digits=2, max_digits=3, op='sort', seed=0):
        super().__init__(min_digits=min_digits, max_digits=max_digits, op=op, seed=seed)

    def grade(self, item, response):
        # chosen by the response, so that a group rarely loses so many samples that it fails
        if zlib.crc32((item.question + response).encode()) % 61 == 0:
            BODY
        return super().grade(item, response)
"""


def _bad_grader(folder: Path, kind: str, failure: str, timeout_s: float = 2) -> tuple[Job, Outcome]:
    """A run whose grader fails in one `kind` of way; `failure`: the metric that must count it."""
    code = folder / "bad_grader.py"
    code.write_text(GRADER.replace("BODY", BODIES[kind]))
    job = Job(folder, f"task.name={code}:Bad", f"task.grade_timeout_s={timeout_s:g}")
    job.wait(lambda: any(r[failure] for r in read_rows(job.run_dir)), "a failed score")
    at = job.steps()
    seconds = job.wait(lambda: job.steps() >= at + 2, "further steps")
    row = read_rows(job.run_dir)[-1]
    saw = f"{failure} {row[failure]:.0f} after {row['step']} steps"
    return job, Outcome(f"{saw}; the groups continue without those samples", seconds)


@fault("a grader that raises")
def grader_raises(folder: Path) -> tuple[Job, Outcome]:
    return _bad_grader(folder, "raises", "ledger/score_errors")


@fault("a grader that hangs")
def grader_hangs(folder: Path) -> tuple[Job, Outcome]:
    return _bad_grader(folder, "hangs", "ledger/score_timeouts")


@fault("a grader that leaks memory")
def grader_leaks(folder: Path) -> tuple[Job, Outcome]:
    # a long deadline, so that the memory limit is what ends it
    return _bad_grader(folder, "leaks", "ledger/score_errors", timeout_s=60)


@fault("a grader that prints without end")
def grader_prints(folder: Path) -> tuple[Job, Outcome]:
    return _bad_grader(folder, "prints", "ledger/score_timeouts")
