"""Study E13: does the step bound keep what training on policy reaches, at any rate and age?

    python -m benchmarks.evidence.step_bound_study [--minutes 60] [--only-page] [--background]

Arms, sizes, hypotheses, margins and gate were registered, here and on
`results/evidence/step_bound.md`, before the first run. A run is 120 steps of the learner alone
(`late_learner.py`) on samples of an exact age. Each finished run is one line of
`benchmarks/results/evidence/step_bound.jsonl`, and is not run again: the command can be stopped at
any time and continued. The page's block of results is made from the lines.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.evidence.evidence import CLAIMS, ROOT, results
from benchmarks.evidence.evidence_page import PAGES
from benchmarks.evidence.evidence_tables import Line, interval, source_digest
from benchmarks.evidence.late_learner import batch, held_out, late_steps, learner, make_start
from benchmarks.evidence.late_study import Study, start_digest
from benchmarks.harness import machine, table
from rlcore.learner.specs import LearnerSpec
from rlcore.objectives.specs import ObjectiveSpec

STEPS, EVERY = 120, 30  # optimizer steps of a run, and between evaluations
START = 0.6  # held-out reward at which supervised steps end
SEEDS = (0, 1, 2)
BOUND = 0.5
ON_POLICY = "on policy"
RATES = (2.5e-5, 5e-5, 1e-4, 2e-4)  # on policy
#: By age: the rate at which 40 steps with tis ended where they began; at 16 by (age + 1)^-0.6.
BORDER = {1: 1.3e-4, 4: 8e-5, 16: 4e-5}
TIMES = (0.25, 1.0, 2.0, 4.0)  # of the border
SAFE = TIMES[0]
MARGIN, HARM = 0.03, 0.05
SOURCES = (
    *("rlcore/learner", "rlcore/corrections", "rlcore/objectives"),
    *("benchmarks/evidence/late_learner.py", "benchmarks/evidence/step_bound_study.py"),
)


@dataclass(frozen=True)
class Arm:
    corrections: tuple[str, ...] = ()
    bound: float | None = None
    phase: int = 1  # steps
    objective: Mapping[str, Any] = field(default_factory=dict)


ARMS = {
    "none": Arm(),
    "tis": Arm(("tis",)),
    "step_bound + tis": Arm(("tis",), BOUND),
    "dppo": Arm(("dppo",), objective={"advantage": "grpo", "loss": "reinforce"}),
    "tis + vcpo": Arm(("tis", "vcpo")),
    "step_bound": Arm((), BOUND),
    "decoupled ppo": Arm(("tis",), phase=4),
}
FIRST = tuple(ARMS)[:5]
PAIRS = {"step_bound + tis": "tis", "step_bound": "none"}  # compared at the safe rate


@dataclass(frozen=True)
class Cell:
    """A run. On policy `age` and `times` are 0."""

    arm: str
    age: int
    times: float
    lr: float
    seed: int

    @property
    def key(self) -> tuple[Any, ...]:
        return self.arm, self.age, self.times, self.lr, self.seed


def cells() -> Iterator[Cell]:
    """Every run, the most informative first."""
    seen = set()
    for cell in _in_order():
        if cell.key not in seen:
            seen.add(cell.key)
            yield cell


def _in_order() -> Iterator[Cell]:
    yield from late(4, (2.0,), 0, ("tis", "step_bound + tis"))
    yield from on_policy(0)
    yield from late(4, (2.0, 1.0), 0, FIRST)
    yield from late(4, (SAFE,), 0, ("tis", "step_bound + tis"))
    yield from late(4, (4.0, 2.0, 1.0), 0, tuple(ARMS))
    for seed in SEEDS:
        yield from on_policy(seed)
        yield from late(4, (1.0,), seed, tuple(ARMS))
    for seed in SEEDS:  # what the statements are judged by, then the rest
        for age in BORDER:
            yield from late(age, (SAFE,), seed, tuple(ARMS))
            yield from late(age, TIMES, seed, ("tis", "step_bound + tis"))
    for seed in SEEDS:
        for age in BORDER:
            yield from late(age, TIMES, seed, tuple(ARMS))


def on_policy(seed: int) -> Iterator[Cell]:
    return (Cell(ON_POLICY, 0, 0.0, lr, seed) for lr in RATES)


def late(age: int, times: Sequence[float], seed: int, arms: Sequence[str]) -> Iterator[Cell]:
    """Runs of one age. At the safe rate: the bound and what it is compared with."""
    for share in times:
        for arm in arms:
            if share != SAFE or arm in PAIRS or arm in PAIRS.values():
                yield Cell(arm, age, share, share * BORDER[age], seed)


def run(cell: Cell, model: Path) -> Line:
    """Run a cell and sum it up. `curve`: held-out reward by step; `samples`, `answer_kl` and
    `scale`: by step, four significant digits."""
    arm = ARMS["none"] if cell.arm == ON_POLICY else ARMS[cell.arm]
    began = time.monotonic()
    spec = LearnerSpec(lr=cell.lr, lr_warmup_steps=3, betas=(0.9, 0.95), step_bound=arm.bound)
    rank = learner(
        model,
        spec,
        STEPS,
        cell.seed,
        lag=cell.age,
        corrections={name: {} for name in arm.corrections},
        objective=ObjectiveSpec(**arm.objective),
    )
    lm = rank.engine.policy.lm
    curve, found = [(0, held_out(lm))], []
    sampled = partial(batch, lm, cell.seed)
    for step, reward, row in late_steps(rank, STEPS, cell.age, arm.phase, sampled):
        # without a bound no factor is in the row; vcpo's own is in the rate
        kl, share = row["step_bound/answer_kl"], row.get("step_bound/scale", 1.0)
        found.append([float(f"{value:.4g}") for value in (reward, kl, share)])
        curve += [(step, held_out(lm))] if step % EVERY == 0 else []
    samples, kls, scales = (list(column) for column in zip(*found, strict=True))
    after = [value for _, value in curve[1:]]
    return {
        **asdict(cell),
        **{"final": after[-1], "mean": fmean(after), "curve": curve},
        **{"kl": fmean(kls), "held": scales.count(0.0), "factor": fmean(scales)},
        **{"samples": samples, "answer_kl": kls, "scale": scales},
        "start": start_digest(model),
        "seconds": round(time.monotonic() - began, 1),
        "machine": machine(),
        "sources": source_digest(ROOT, SOURCES),
    }


def _key(line: Line) -> tuple[Any, ...]:
    return line["arm"], line["age"], line["times"], line["lr"], line["seed"]


def found_at(found: Sequence[Line], arm: str, **at: float) -> list[Line]:
    """Runs of an arm where `at` (age, times, lr) holds, by seed."""
    own = [r for r in found if r["arm"] == arm and all(r[k] == v for k, v in at.items())]
    return sorted(own, key=lambda line: line["seed"])


def best_on_policy(found: Sequence[Line], of: str) -> list[Line]:
    """Runs of the on-policy rate whose mean over the seeds is highest; none before all are done."""
    rates = [found_at(found, ON_POLICY, lr=lr) for lr in RATES]
    if any(len(own) < len(SEEDS) for own in rates):
        return []
    return max(rates, key=lambda own: fmean(line[of] for line in own))


def judged(runs: Sequence[Line], others: Sequence[Line], of: str, least: float) -> str:
    """Verdict that `runs` end at least `least` above `others`, paired by seed."""
    if len(runs) < len(SEEDS) or len(others) < len(SEEDS):
        return "not judged"
    mean, low, high = interval([a[of] - b[of] for a, b in zip(runs, others, strict=True)])
    verdict = "supported" if low >= least else "refuted" if high < least else "open"
    return f"{verdict}: {mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def hypotheses(found: Sequence[Line]) -> list[dict[str, str]]:
    """The registered statements, by age, with their verdicts on the two measures."""
    rows = []
    for age in BORDER:
        gate = best_on_policy(found, "final"), found_at(found, "tis", age=age, times=2.0)
        rows.append({"statement": f"gate: tis at 2x ends {HARM} below on policy, age {age}"})
        rows[-1] |= {"final": judged(*gate, "final", HARM), "mean": ""}
        open_gate = not rows[-1]["final"].startswith("supported")
        for times in TIMES[1:]:
            own = found_at(found, "step_bound + tis", age=age, times=times)
            said = f"bound + tis at least -{MARGIN} above on policy, age {age}, {times:g}x"
            rows.append({"statement": said})
            for of in ("final", "mean"):
                verdict = judged(own, best_on_policy(found, of), of, -MARGIN)
                gated = open_gate and verdict != "not judged"
                rows[-1][of] = f"none, gate not met (else {verdict})" if gated else verdict
        for arm, other in PAIRS.items():
            pair = [found_at(found, name, age=age, times=SAFE) for name in (arm, other)]
            said = f"{arm} at least -{MARGIN} above {other}, age {age}, {SAFE}x"
            rows.append({"statement": said})
            rows[-1] |= {of: judged(*pair, of, -MARGIN) for of in ("final", "mean")}
    return rows


def shown(runs: Sequence[Line]) -> str:
    """Final and mean held-out reward, mean D, steps held, and the number of seeds."""
    if not runs:
        return ""
    final, mean, kl, held = (fmean(r[k] for r in runs) for k in ("final", "mean", "kl", "held"))
    return f"{final:.3f}, {mean:.3f}; {kl:.2g}; {held:.0f} ({len(runs)})"


def tables(found: Sequence[Line]) -> list[str]:
    """The on-policy rates, and the arms of each age that has runs."""
    on = {f"{lr:g}": shown(found_at(found, ON_POLICY, lr=lr)) for lr in RATES}
    made = [table([{"on policy at": "", **on}])] if any(on.values()) else []
    for age, border in BORDER.items():
        rows = []
        for arm in ARMS:
            values = {f"{x:g}x": shown(found_at(found, arm, age=age, times=x)) for x in TIMES}
            rows.append({f"age {age}, border {border:g}": arm, **values})
        made += [table(rows)] if any(line["age"] == age for line in found) else []
    return made


def block(found: Sequence[Line]) -> list[str]:
    """The start, the tables by age, and the statements."""
    if not found:
        return [table(hypotheses(found))]
    begin = fmean(line["curve"][0][1] for line in found)
    said = (
        f"Held-out reward at the start: {begin:.3f}. Each entry: held-out reward at the end, "
        "its mean over the four evaluations; mean D in nats; steps held (number of seeds)."
    )
    return [said, *tables(found), table(hypotheses(found))]


STUDY = Study(
    name="step_bound",
    file=results("step_bound"),
    page=PAGES / "step_bound.md",
    start=CLAIMS / "step_bound-start",
    make_start=partial(make_start, least=START),
    cells=cells,
    run=run,
    key=_key,
    tables=block,
    sources=SOURCES,
    part=lambda key: key[-1],  # runs are compared by seed
)

if __name__ == "__main__":
    STUDY.main(__doc__)
