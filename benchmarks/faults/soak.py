"""Soak test: the quickstart run for an hour, with a rollout actor killed every two minutes.

    python -m benchmarks.faults.soak [--minutes 60] [--kill-every 120] [--undisturbed RUN_DIR]
                              [key=value ...]

Prints the memory of all processes by role (PSS in MiB after a tenth of the time and at the end, and
the slope between), the audit of the ledger, and the held-out accuracy next to that of an
undisturbed run.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import psutil

from benchmarks.faults.job import Job, audit
from benchmarks.harness import machine, read_rows, table
from benchmarks.status import run_and_record

ROLES = (
    "RolloutActor",
    "LearnerActor",
    "BufferActor",
    "ScorerActor",
    "grading_worker",
    "gcs_server",
    "raylet",
)

# Overrides the small model of the fault suite.
QUICKSTART_SIZE = (
    "model.fresh.hidden_size=192",
    "model.fresh.layers=4",
    "task.args.min_digits=4",
    "task.args.max_digits=8",
    "model.warmup.batch_size=128",
    "schedule.groups_per_step=64",
    "rollout.samples_per_prompt=8",
    "evaluation.prompts=256",
)


def memory(job: Job) -> dict[str, float]:
    """PSS in bytes of every process of the run, summed by role."""
    found: dict[str, float] = defaultdict(float)
    root = psutil.Process(job.process.pid)
    for p in job.family():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            words = " ".join(p.cmdline()) + p.name()
            role = next((r for r in ROLES if r in words), "rlcore train" if p == root else "other")
            found[role] += p.memory_full_info().pss
    return dict(found)


def slope(series: list[tuple[float, float]]) -> float:
    """Bytes an hour, between the medians of the first and the last fifth."""
    n = max(1, len(series) // 5)
    (t0, t1), (m0, m1) = (
        [median(p[i] for p in part) for part in (series[:n], series[-n:])] for i in (0, 1)
    )
    return (m1 - m0) / max(t1 - t0, 1e-9) * 3600


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--kill-every", type=float, default=120, help="seconds; 0: never")
    parser.add_argument("--undisturbed", help="directory of a run without kills")
    chosen, words = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="rlcore-soak-")) / "job"
    folder.mkdir()
    job = Job(
        folder,
        *QUICKSTART_SIZE,
        *(
            "cluster.max_restarts=1000000",
            "cluster.heartbeat_s=2",
            "cluster.hang_timeout_s=60",
            "checkpoint.every=50",
        ),
        *words,
    )
    job.wait(lambda: job.steps() >= 2, "two steps", 600)
    begun, kills = time.monotonic(), 0
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    while (now := time.monotonic() - begun) < chosen.minutes * 60:
        if chosen.kill_every and now > (kills + 1) * chosen.kill_every:
            victims = job.find("RolloutActor")
            if victims:
                victims[-1].kill()
                kills += 1
        if job.process.poll() is not None:
            raise RuntimeError(f"the run ended:\n{job.text()[-3000:]}")
        if now > 0.1 * chosen.minutes * 60:
            for role, used in memory(job).items():
                series[role].append((now, used))
        time.sleep(5)
    code = job.stop()
    left, rows = job.left(), read_rows(job.run_dir)
    books = audit(job.run_dir, groups_per_step=64)
    figures = [
        {
            "process": role,
            "MiB early": s[0][1] / 2**20,
            "MiB late": median(m for _, m in s[-5:]) / 2**20,
            "MiB an hour": slope(s) / 2**20,
        }
        for role, s in series.items()
        if len(s) > 5
    ]
    print(table(figures))
    last = rows[-1]
    print(
        f"\n{chosen.minutes:g} minutes, {kills} kills, "
        f"{last['rollout/replacements']:.0f} replacements, {last['step']} steps: "
        f"{books.admitted} groups admitted = {books.consumed} trained on + {books.live} live + "
        f"{books.lost} lost; {books.twice} twice; staleness at most {books.staleness:.0f}; "
        f"exit code {code}; {len(left)} processes left over"
    )
    undisturbed = read_rows(chosen.undisturbed) if chosen.undisturbed else []
    for name, found in (("this run", rows), ("undisturbed", undisturbed)):
        curve = [
            (r["step"], r["eval/digits/greedy"])
            for r in found
            if r.get("eval/digits/greedy") is not None
        ]
        shown = curve[:: max(1, len(curve) // 8)]
        if shown:
            print(f"{name}: greedy accuracy " + ", ".join(f"{a:.3f} at step {s}" for s, a in shown))
    print(machine())
    return 0 if not (books.lost or books.twice or left or code != 130) else 1


if __name__ == "__main__":
    run_and_record(main, __file__)
