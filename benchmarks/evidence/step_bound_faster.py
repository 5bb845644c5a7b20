"""E13b: three ways to learn faster with the step bound, at the same start and samples as E13.

    python -m benchmarks.evidence.step_bound_faster [--minutes 60] [--only-page] [--background]

Arms and statements were registered, here and on `results/evidence/step_bound_faster.md`, before the
first run. A run is one of `step_bound_study.py` with another arm; each finished one is one line of
a file, and is not run again. The page compares the runs with E13's by pairs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from benchmarks.evidence import step_bound_study as e13
from benchmarks.evidence.evidence import CLAIMS, ROOT, lines, results
from benchmarks.evidence.evidence_page import PAGES
from benchmarks.evidence.evidence_tables import Line, interval, source_digest
from benchmarks.evidence.late_learner import batch, held_out, late_steps, learner, make_start
from benchmarks.evidence.late_study import Study, start_digest
from benchmarks.harness import machine, table
from rlcore.learner.specs import LearnerSpec
from rlcore.objectives.specs import ObjectiveSpec

BASE = "step_bound + tis"  # the arm of E13 that each is compared with
SEEDS, AGES = (1, 2), tuple(e13.BORDER)  # the seeds that E13 has from this start
SOURCES = (*e13.SOURCES, "benchmarks/evidence/step_bound_faster.py")


@dataclass(frozen=True)
class Arm:
    correction: str = "tis"
    bound: float = e13.BOUND
    beta1: float = 0.9
    objective: Mapping[str, Any] = field(default_factory=dict)


ARMS = {
    "bound + dppo": Arm("dppo", objective=e13.ARMS["dppo"].objective),
    "bound of 0.2 nats + tis": Arm(bound=0.2),
    "bound + tis, beta1 0.5": Arm(beta1=0.5),
}


def cells() -> Iterator[e13.Cell]:
    """Every run: twice the border with both seeds, then four times with one."""
    for times, seeds in ((2.0, SEEDS), (4.0, SEEDS[:1])):
        for seed in seeds:
            for age in AGES:
                yield from (e13.Cell(a, age, times, times * e13.BORDER[age], seed) for a in ARMS)


def run(cell: e13.Cell, model: Any) -> Line:
    """Run a cell and sum it up; see `step_bound_study.run`."""
    arm, began = ARMS[cell.arm], time.monotonic()
    betas = (arm.beta1, 0.95)
    spec = LearnerSpec(lr=cell.lr, lr_warmup_steps=3, betas=betas, step_bound=arm.bound)
    rank = learner(
        model,
        spec,
        e13.STEPS,
        cell.seed,
        lag=cell.age,
        corrections={arm.correction: {}},
        objective=ObjectiveSpec(**arm.objective),
    )
    lm = rank.engine.policy.lm
    curve, kls, scales = [(0, held_out(lm))], [], []
    for step, _, row in late_steps(rank, e13.STEPS, cell.age, 1, partial(batch, lm, cell.seed)):
        kls.append(row["step_bound/answer_kl"])
        scales.append(row["step_bound/scale"])
        curve += [(step, held_out(lm))] if step % e13.EVERY == 0 else []
    after = [value for _, value in curve[1:]]
    return {
        **asdict(cell),
        **{"final": after[-1], "mean": fmean(after), "curve": curve},
        **{"kl": fmean(kls), "held": scales.count(0.0), "factor": fmean(scales)},
        **{"start": start_digest(model), "seconds": round(time.monotonic() - began, 1)},
        **{"machine": machine(), "sources": source_digest(ROOT, SOURCES)},
    }


def gains(found: Sequence[Line], base: Sequence[Line], arm: str, of: str) -> list[float]:
    """By age and seed at twice the border, how far `arm` is above E13's arm; pairs alone."""
    pairs = []
    for age in AGES:
        own, others = (
            {r["seed"]: r[of] for r in e13.found_at(among, name, age=age, times=2.0)}
            for among, name in ((found, arm), (base, BASE))
        )
        pairs += [own[seed] - others[seed] for seed in SEEDS if seed in own and seed in others]
    return pairs


def judged(pairs: Sequence[float]) -> str:
    """Verdict that the mean of all six pairs is above 0."""
    if len(pairs) < len(AGES) * len(SEEDS):
        return "not judged"
    mean, low, high = interval(list(pairs))
    verdict = "supported" if low > 0 else "refuted" if high < 0 else "open"
    return f"{verdict}: {mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def block(found: Sequence[Line]) -> list[str]:
    """The runs with E13's of the same starts, and the statements."""
    starts = {(r["seed"], r["start"]) for r in found}
    base = [r for r in lines(e13.STUDY.file) if (r["seed"], r["start"]) in starts]
    rows = []
    for age in AGES:
        for arm in (BASE, *ARMS):
            among = base if arm == BASE else found
            at = {f"{x:g}x": e13.found_at(among, arm, age=age, times=x) for x in (2.0, 4.0)}
            rows.append({"age": age, "arm": arm, **{k: e13.shown(v) for k, v in at.items()}})
    said = [
        {
            "statement": f"{arm} above {BASE} at 2x, all ages",
            **{of: judged(gains(found, base, arm, of)) for of in ("final", "mean")},
        }
        for arm in ARMS
    ]
    return [table(rows), table(said)]


STUDY = Study(
    name="step_bound_faster",
    file=results("step_bound_faster"),
    page=PAGES / "step_bound_faster.md",
    start=CLAIMS / "step_bound-start",
    make_start=partial(make_start, least=e13.START),
    cells=cells,
    run=run,
    key=lambda line: (line["arm"], line["age"], line["times"], line["lr"], line["seed"]),
    tables=block,
    sources=SOURCES,
    part=lambda key: key[-1],
)

if __name__ == "__main__":
    STUDY.main(__doc__)
