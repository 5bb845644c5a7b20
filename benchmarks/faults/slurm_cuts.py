"""A node of rollout actors is off the network for a while, on a real Slurm of three nodes.

    python -m benchmarks.faults.slurm_cuts [SECONDS ...] [--slurmd-timeout 300]

One run on the cluster of tests/launch/slurm (namespaces of this machine; needs root, slurm-wlm,
munge, iproute2): the learner on n1, one actor on each of n2 and n3. n3 is cut off once for
each number of seconds, in one run. "Full rate": both actors are given work (rollout/in_rotation).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / "tests" / part) for part in (".", "launch")]

from slurm_cluster import THREE, Job, lacks, small_cluster  # noqa: E402
from timing import wait_until  # noqa: E402

AFTER_S = 900  # deadline for both actors to be back
AGAIN = re.compile(r"(\d+) groups .*(?:assigned|sampled) again")


def rows(job: Job) -> list[dict]:
    path = job.run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def serving(job: Job) -> int:
    found = rows(job)
    return int(found[-1]["rollout/in_rotation"]) if found else 0


def cut(job: Job, seconds: float) -> dict:
    """Cut n3 off; watch the run until both actors have had work for ten steps."""
    wait_until(lambda: serving(job) == 2, AFTER_S, "both actors", 0.5)
    job.wait_rows(10)
    notes, steps = len(job.notes()), job.rows
    job.cluster.cut("n3")
    began, last, lost, longest, least = time.monotonic(), job.rows, 0, 0.0, 2
    moved = back = began
    joined = False
    while True:
        time.sleep(0.1)
        now, count = time.monotonic(), job.rows
        if not joined and now >= began + seconds:
            job.cluster.connect("n3")
            joined = True
        lost += max(0, last - count)  # a recovery takes rows back
        if count != last:
            longest, moved = max(longest, now - moved), now
            least = min(least, serving(job))
        if serving(job) < 2:
            back = now
        last = count
        if (joined and now > max(back, began + seconds) + 30) or now > began + seconds + AFTER_S:
            break
    said = [note for note in job.notes()[notes:] if AGAIN.search(note)]
    return {
        "cut s": seconds,
        "steps lost": lost,
        "groups again": sum(int(AGAIN.search(note)[1]) for note in said),
        "steps meanwhile": job.rows - steps,
        "longest pause s": round(longest, 1),
        "fewest actors": least,
        "s from cut to full rate": round(back - began, 1) if serving(job) == 2 else None,
        "restarts": job.shown("Restarts"),
        "said": [n for n in job.notes()[notes:]],
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=float, nargs="*", default=[5, 30, 300])
    parser.add_argument("--slurmd-timeout", type=int, default=600)
    asked = parser.parse_args()
    if why := lacks():
        sys.exit(why)
    os.environ["RLC_SLURMD_TIMEOUT"] = str(asked.slurmd_timeout)
    with small_cluster() as cluster:
        words = ("checkpoint.every_s=60", "cluster.hang_timeout_s=30")
        job = cluster.launch("cuts", *THREE, *words)
        job.wait_rows(20, 900)
        for seconds in asked.seconds:
            print(json.dumps(cut(job, seconds)), flush=True)
        print(job.text[-6000:], flush=True)
        job.end()
        print(f"rows {job.rows}, newest checkpoint {job.newest}, {job.shown('JobState')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
