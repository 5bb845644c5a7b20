"""Answers of about 200 tokens: where do late runs begin to lose, by nats an answer or by token?

    python -m benchmarks.evidence.step_bound_long [--minutes 60] [--only-page] [--background]

The step bound counts at most 128 tokens of an answer, a choice that answers of 7 to 95 tokens
cannot judge. A run is 40 steps of the learner alone (`late_learner.py`): sort 160 to 240 digits,
AdamW, samples of age 4 or 0. Arms: tis and on policy at five rates, and tis with a bound of 0.5
nats, counted for 128 tokens and for all of them (which is a bound of `0.5 * 128 / tokens` to a
bound that counts 128). Each finished run is one line of a file, and is not run again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.evidence.evidence import CLAIMS, ROOT, results
from benchmarks.evidence.evidence_page import PAGES
from benchmarks.evidence.evidence_tables import Line, source_digest
from benchmarks.evidence.late_learner import (
    Draw,
    batch,
    late_steps,
    learner,
    make_start,
    problems,
    sample,
)
from benchmarks.evidence.late_study import Study, start_digest
from benchmarks.harness import machine, table
from rlcore.learner.specs import LearnerSpec

LENGTHS = (160, 240)  # digits of a problem
TOKENS = sum(LENGTHS) / 2 + 1  # of an answer, with its end
COUNTED = 128  # tokens of an answer that the bound counts
HOW = Draw(most=LENGTHS[1] + 8, groups=8, samples=4)
HELD_OUT = 64  # problems, one sampled answer each
START = 0.5  # held-out reward at which supervised steps end
STEPS, AGE, BOUND = 40, 4, 0.5
RATES = (1e-5, 2.5e-5, 5e-5, 1e-4, 2e-4)
ON_POLICY, FEW, ALL = "on policy", "tis, bound of 128 tokens", "tis, bound of all tokens"
BOUNDS = {FEW: BOUND, ALL: BOUND * COUNTED / TOKENS}
SOURCES = (
    *("rlcore/learner", "rlcore/corrections", "rlcore/objectives"),
    *("benchmarks/evidence/late_learner.py", "benchmarks/evidence/step_bound_long.py"),
)


@dataclass(frozen=True)
class Cell:
    """A run."""

    arm: str
    lr: float
    seed: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        return self.arm, self.lr, self.seed


def cells() -> Iterator[Cell]:
    """Every run, the most informative first."""
    for lr in reversed(RATES):
        yield Cell("tis", lr)
    for lr in RATES[:1:-1]:
        yield from (Cell(arm, lr) for arm in BOUNDS)
    for lr in RATES:
        yield Cell(ON_POLICY, lr)


def held_out(lm: Any) -> float:
    """Mean reward on the held-out problems, the same problems and seed of draws each time."""
    drawn = sample(lm, problems(99, "held out", 0, HELD_OUT, LENGTHS), 7, HOW)
    return float(np.mean([one.reward for one in drawn]))


def run(cell: Cell, model: Path) -> Line:
    """Run a cell and sum it up. `kl`: mean D by step, k3 of stale tokens times an answer's
    tokens, however many."""
    began = time.monotonic()
    late = cell.arm != ON_POLICY
    bound = BOUNDS.get(cell.arm)
    spec = LearnerSpec(lr=cell.lr, lr_warmup_steps=3, betas=(0.9, 0.95), step_bound=bound)
    age = AGE if late else 0
    corrections: dict[str, dict[str, Any]] = {"tis": {}} if late else {}
    rank = learner(model, spec, STEPS, cell.seed, lag=age, corrections=corrections, how=HOW)
    lm = rank.engine.policy.lm
    before = held_out(lm)
    sampled = partial(batch, lm, cell.seed, lengths=LENGTHS, how=HOW)
    steps = [
        (reward, row["step_bound/answer_kl"] * TOKENS / COUNTED, row.get("step_bound/scale", 1.0))
        for _, reward, row in late_steps(rank, STEPS, age, 1, sampled)
    ]
    samples, kls, scales = (list(column) for column in zip(*steps, strict=True))
    return {
        **asdict(cell),
        **{"before": before, "final": held_out(lm), "last": fmean(samples[-5:])},
        **{"kl": fmean(kls), "held": scales.count(0.0), "factor": fmean(scales)},
        **{"samples": [round(v, 4) for v in samples], "answer_kl": [round(v, 4) for v in kls]},
        **{"start": start_digest(model), "seconds": round(time.monotonic() - began, 1)},
        **{"machine": machine(), "sources": source_digest(ROOT, SOURCES)},
    }


def _key(line: Line) -> tuple[Any, ...]:
    return line["arm"], line["lr"], line["seed"]


def block(found: Sequence[Line]) -> list[str]:
    """Arms by rate: held-out reward at the end, and mean D."""
    if not found:
        return []
    by = {_key(line): line for line in found}
    rows = []
    for arm in (ON_POLICY, "tis", *BOUNDS):
        runs = {lr: by.get((arm, lr, 0)) for lr in RATES}
        shown = {
            f"{lr:g}": f"{r['final']:.3f}; {r['kl']:.2g}" if r else "" for lr, r in runs.items()
        }
        rows.append({"arm": arm, **shown})
    said = (
        f"Held-out reward at the start: {found[0]['before']:.3f}. Each entry, by rate: held-out "
        "reward after 40 steps; mean D in nats of a whole answer (one seed)."
    )
    return [said, table(rows)]


STUDY = Study(
    name="step_bound_long",
    file=results("step_bound_long"),
    page=PAGES / "step_bound_long.md",
    start=CLAIMS / "step_bound_long-start",
    make_start=partial(make_start, least=START, size=32, lengths=LENGTHS, score=held_out),
    cells=cells,
    run=run,
    key=_key,
    tables=block,
    sources=SOURCES,
)

if __name__ == "__main__":
    STUDY.main(__doc__)
