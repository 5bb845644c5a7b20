"""Kills all processes of a run (kill -9) at random moments, resumes it, and counts losses.

    python -m benchmarks.faults.kill_resume [--times 20] [--seed 0]

One small asynchronous run with a checkpoint every three steps is killed twenty times, between its
start and a few seconds into training: during start-up, restoring, a step, a publish or a
checkpoint. After every kill the ledger of the newest checkpoint is audited. At the end the run is
stopped normally and audited again.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.faults.job import Job, audit
from benchmarks.harness import machine, read_rows, table


def life(folder: Path, seconds: float) -> tuple[Job, str]:
    """Start or resume the run and kill all of it `seconds` after its first step (negative: after
    its start); the job and its new log text."""
    resumes = any((folder / "run" / "checkpoints").glob("step_*"))
    log_at = (folder / "log").stat().st_size if resumes else 0
    job = Job(folder, "checkpoint.every=3", "checkpoint.keep=3")
    begun = time.monotonic()
    if seconds < 0:
        while time.monotonic() - begun < -seconds and job.process.poll() is None:
            time.sleep(0.05)
    else:
        if resumes:  # before that, metrics.jsonl may hold steps that will be rolled back
            job.wait(
                lambda: "continuing from" in job.log.read_bytes()[log_at:].decode(errors="replace"),
                "a resume",
            )
        at = job.steps()
        job.wait(lambda: job.steps() > at, "a step")
        end = time.monotonic() + seconds
        while time.monotonic() < end and job.process.poll() is None:
            time.sleep(0.05)
    assert job.process.poll() is None, job.text()[-2000:]
    job.kill_everything()
    said = job.log.read_bytes()[log_at:].decode(errors="replace")
    return job, said


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    draw = random.Random(chosen.seed)
    root = Path(tempfile.mkdtemp(prefix="rlcore-kill-"))
    folder = root / "run"
    folder.mkdir()
    rows = []
    for number in range(1, chosen.times + 1):
        seconds = draw.choice(
            [draw.uniform(-25.0, -1.0), draw.uniform(0.0, 4.0), draw.uniform(0.0, 4.0)]
        )
        if number == 1:
            seconds = 4.0  # late enough for a checkpoint to resume from
        job, said = life(folder, seconds)
        continued = re.findall(r"continuing from (step_\d+)", said)
        reissued = re.findall(r"(\d+) groups were in flight at the checkpoint", said)
        passed_over = said.count("is passed over")
        left = job.left()
        books = audit(job.run_dir) if list((job.run_dir / "checkpoints").glob("step_*")) else None
        rows.append(
            {
                "kill": number,
                "moment": f"{seconds:+.1f} s",
                "continued from": continued[0] if continued else "-",
                "reissued": reissued[0] if reissued else "-",
                "steps seen": job.steps(),
                "half-written": len(list((job.run_dir / "checkpoints").glob(".*.partial"))),
                "passed over": passed_over,
                "left over": len(left),
                "lost": books.lost if books else 0,
                "twice": books.twice if books else 0,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    job = Job(folder)
    at = job.steps()
    job.wait(lambda: job.steps() > at + 3, "further steps")
    assert job.stop() == 130, job.text()[-2000:]
    books = audit(job.run_dir)
    steps = [r["step"] for r in read_rows(job.run_dir)]
    assert steps == list(range(1, len(steps) + 1)), "rows are missing or doubled"
    print(f"\n{table(rows)}\n")
    print(
        f"{chosen.times} kills, {len(steps)} steps: {books.admitted} groups admitted = "
        f"{books.consumed} trained on + {books.live} live + {books.lost} lost; {books.twice} "
        f"trained on twice; staleness at most {books.staleness:.0f} of the bound 1. {machine()}"
    )
    clean = (
        not books.lost
        and not books.twice
        and books.staleness <= 1
        and not any(r["left over"] for r in rows)
    )
    if clean:
        shutil.rmtree(root)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
