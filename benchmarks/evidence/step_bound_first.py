"""The first steps of a late run, before the step bound has a measure: three ways to take them.

    python -m benchmarks.evidence.step_bound_first START [--arms plain,opened,shortened]
        [--warmup 3 0]

START is a folder that `late_learner.make_start` has made. plain: as the bound does today; opened:
the age of samples grows by one every second step until kappa is measured; shortened: until then
each step has 1/(age + 1) of its rate. Prints a line of JSON a run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.evidence.late_learner import batch, held_out, learner
from rlcore.learner.rank import LearnerRank
from rlcore.learner.specs import LearnerSpec

ARMS = ("plain", "opened", "shortened")


class Shortened:
    """Takes 1/(age + 1) of each step until the rank's bound has a measure."""

    def __init__(self, rank: LearnerRank, age: int) -> None:
        self.measured, self._age, self._whole = False, age, rank._bounded.scale
        rank._bounded.scale = self  # type: ignore[method-assign,assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._whole(*args, **kwargs)
        self.measured |= found.metrics["step_bound/kappa"] > 0
        share = 1.0 if self.measured else 1 / (self._age + 1)
        return found._replace(scale=found.scale * share)


def steps(rank: LearnerRank, count: int, seed: int, age: int, arm: str) -> Iterator[dict[str, Any]]:
    """Rows with the mean reward of their samples."""
    if arm == "shortened":
        Shortened(rank, age)
    waiting: dict[int, Any] = {}
    lm, row, sampled = rank.engine.policy.lm, {"step_bound/kappa": 0.0}, 0
    for step in range(count):
        opening = arm == "opened" and not row["step_bound/kappa"]
        while sampled < count and sampled - step <= (min(step, age) if opening else age):
            waiting[sampled] = batch(lm, seed, sampled, step)
            sampled += 1
        groups = waiting.pop(step)
        rank.begin_phase([groups])
        row = rank.train_step(step)
        yield row | {"reward": fmean(e.score.reward for g in groups for e in g.episodes)}


def run(start: Path, arm: str, args: argparse.Namespace, warmup: int) -> dict[str, Any]:
    """One run, summed up."""
    spec = LearnerSpec(lr=args.lr, lr_warmup_steps=warmup, betas=(0.9, 0.95), step_bound=0.5)
    rank = learner(start, spec, args.steps, args.seed, corrections={"tis": {}})
    before = held_out(rank.engine.policy.lm)
    rows = list(steps(rank, args.steps, args.seed, args.age, arm))
    kls = [row["step_bound/answer_kl"] for row in rows]
    scales = [row["step_bound/scale"] for row in rows]
    return {
        **{"arm": arm, "warmup": warmup, "lr": args.lr, "age": args.age, "seed": args.seed},
        **{"start": before, "end": held_out(rank.engine.policy.lm)},
        **{"least": min(row["reward"] for row in rows)},
        **{"mean": fmean(row["reward"] for row in rows)},
        **{"largest": max(kls), "above": sum(kl > 1.0 for kl in kls), "held": scales.count(0.0)},
        **{"kl": [round(kl, 3) for kl in kls], "scale": [round(s, 3) for s in scales]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("start", type=Path)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--warmup", type=int, nargs="+", default=[3, 0])
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--age", type=int, default=4)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for warmup in args.warmup:
        for arm in args.arms.split(","):
            print(json.dumps(run(args.start, arm, args, warmup)), flush=True)


if __name__ == "__main__":
    main()
