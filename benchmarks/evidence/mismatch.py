"""Training under a deliberate mismatch, with each correction.

    python -m benchmarks.evidence.mismatch --model FOLDER [--mismatch int4 noise]
                                  [--corrections none tis jackpot] [--seeds 0 1 2]

Every run starts from the same warmed-up model; the seed changes prompts and samples. Collapse step:
the first step at which the mean reward over five steps falls below half of the best such mean
before it. Accuracy is measured on a plain engine with the policy's weights
(`evaluation.dense_actor`), not on the degraded actor.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.harness import machine, rlcore, table
from benchmarks.status import run_and_record

MISMATCHES = {
    "none": [],
    "int4": ["actor=fp8", "actor.fp8.rounding=int4"],
    "noise": ["actor.bf16.logit_noise=0.5"],
    "stale": ["schedule.max_staleness=16"],
    "temperature": ["actor.bf16.temperature_scale=1.3"],
}
CORRECTIONS = {
    "none": ["correction=none"],
    "tis": ["correction=[tis]"],
    "mis": ["correction=[mis]"],
    "icepop": ["correction=[icepop]"],
    "veto": ["correction=[veto]"],
    "jackpot": ["correction=[jackpot]"],
    "ais": ["correction=[ais]"],
    "dvp+mis+veto": ["correction=[dvp,mis,veto]"],
    "rapid": ["correction=[rapid]", "algorithm=rapid"],
}
ACCURACY = "eval/digits/greedy"


def collapse_step(rewards: list[float]) -> int | None:
    """First step whose trailing mean of five is below half of the best such mean before it."""
    means = [statistics.fmean(rewards[i - 4 : i + 1]) for i in range(4, len(rewards))]
    for i, mean in enumerate(means):
        if i and mean < 0.5 * max(means[:i]):
            return i + 5
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mismatch", nargs="+", default=["int4"], choices=list(MISMATCHES))
    parser.add_argument(
        "--corrections", nargs="+", default=list(CORRECTIONS), choices=list(CORRECTIONS)
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--model", required=True, help="the warmed-up model that every run starts from"
    )
    parser.add_argument("words", nargs="*", help="further overrides, behind --")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for mismatch in args.mismatch:
        for name in args.corrections:
            finals, kls, esses, collapses = [], [], [], []
            for seed in args.seeds:
                run = rlcore(
                    "train",
                    "experiment=quickstart",
                    *MISMATCHES[mismatch],
                    *CORRECTIONS[name],
                    f"model.path={args.model}",
                    f"seed={seed}",
                    f"schedule.steps={args.steps}",
                    "evaluation.every=0",
                    "evaluation.at_start=false",
                    "evaluation.dense_actor=true",
                    "logging=quiet",
                    "checkpoint.at_end=false",
                    *args.words,
                )
                finals.append(run.rows[-1][ACCURACY])
                kls.append(statistics.fmean(r["mismatch/kl_k3"] for r in run.rows))
                esses.append(statistics.fmean(r["mismatch/ess"] for r in run.rows))
                collapses.append(collapse_step([r["reward/mean"] for r in run.rows]))
            rows.append(
                {
                    "mismatch": mismatch,
                    "correction": name,
                    "held-out accuracy of the policy, mean": statistics.fmean(finals),
                    "per seed": " ".join(f"{f:.3f}" for f in finals),
                    "KL(p_inf||p_ref)": statistics.fmean(kls),
                    "ESS": statistics.fmean(esses),
                    "collapse step per seed": " ".join(
                        "none" if c is None else str(c) for c in collapses
                    ),
                }
            )
            print(rows[-1], flush=True)
    print(f"\n{args.steps} steps after the same start, seeds {args.seeds}; {machine()}\n")
    print(table(rows))


if __name__ == "__main__":
    run_and_record(main, __file__)
