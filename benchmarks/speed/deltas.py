"""How many weights change their bfloat16 value from one version to the next, by learning rate, and
what publications that send only those (`cluster.full_weights_every`) take.

    python -m benchmarks.speed.deltas [--rates 1e-6,1e-5,1e-4] [--steps 9] [key=value ...]

Whole runs of the quickstart's task: a real engine in bfloat16, a learner in float32 whose weights
are published in bfloat16, each version proven by checksums. One row a learning rate: the mean share
of the entries sent as changed, and the mean MiB of a publication, over those between whole sets.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.harness import machine, rlcore, table

RUN = [
    "experiment=quickstart",
    "actor.bf16.dtype=bfloat16",
    "learner.lr_schedule=constant",
    "learner.lr_warmup_steps=0",
    "schedule.groups_per_step=16",
    "evaluation.every=0",
    "evaluation.at_start=false",
    "evaluation.prompts=8",
    "checkpoint.at_end=false",
    "logging=quiet",
]


def measured(rate: float, steps: int, words: list[str]) -> dict[str, Any]:
    """The table's row of one learning rate."""
    run = rlcore(
        "train",
        *RUN,
        f"learner.lr={rate:g}",
        f"schedule.steps={steps}",
        f"cluster.full_weights_every={steps + 1}",
        *words,
    )
    rows = [r for r in run.rows if r.get("publish/changed_share") is not None]
    patches = [r for r in rows if r["publish/changed_share"] < 1.0]
    whole = run.rows[0]
    return {
        "learning rate": f"{rate:g}",
        "publications": len(patches),
        "entries changed": statistics.mean(r["publish/changed_share"] for r in patches),
        "MiB sent": statistics.mean(r["publish/sent_mib"] for r in patches),
        "seconds": statistics.median(r["time/publish_s"] for r in patches),
        "seconds at most": max(whole["time/publish_s"], *(r["time/publish_s"] for r in patches)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="1e-6,1e-5,1e-4")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("words", nargs="*", help="further overrides")
    args = parser.parse_args()
    found = []
    for rate in map(float, args.rates.split(",")):
        found.append(measured(rate, args.steps, args.words))
        print(found[-1], flush=True)
    print(f"\n{machine()}\n\n{table(found)}")


if __name__ == "__main__":
    main()
