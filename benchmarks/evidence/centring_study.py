"""Study E14: what drift costs at tokens that the reward does not judge, and what centring saves.

    python -m benchmarks.evidence.centring_study [--minutes 60] [--only-page] [--background]

Arms, sizes, predictions, margins and gate stand here and on `results/evidence/centring.md`,
registered before the first run. A run is 192 steps of the learner alone (`late_learner.py`) on
samples of an actor that differs from it. The answer is ten sorted digits; the sixteen tokens after
it are not judged. Each finished run is one line of `benchmarks/results/evidence/centring.jsonl`;
the command can be stopped and continued.

The rate of all runs is chosen first by a pilot of the matched arm (`chosen`), whose runs have other
seeds, are lines of `centring_pilot.jsonl` and are no results.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from benchmarks.evidence import late_learner as late
from benchmarks.evidence.evidence import CLAIMS, ROOT, lines, results
from benchmarks.evidence.evidence_page import PAGES
from benchmarks.evidence.evidence_tables import Line, interval, source_digest
from benchmarks.evidence.late_learner import END, Draw
from benchmarks.evidence.late_study import Study, start_digest
from benchmarks.harness import machine, table
from rlcore.learner.specs import LearnerSpec
from rlcore.weights.rounding import round_weights
from rlcore.weights.specs import RoundingSpec

STEPS, EVERY = 192, 32  # optimizer steps of a run, and between evaluations
DIGITS, FREE = 10, 16
LENGTHS = (DIGITS, DIGITS)
START = 0.45  # accuracy at which supervised steps end
RATES = tuple(4e-5 / 2**n for n in range(6))  # of the pilot: the first one that holds counts
HOLDS = (0.4, 0.8)  # bounds of held-out accuracy in every look
NOISE = 1.0  # deviation of the logits' noise; actors' KL is in each line
AGE = 16
INT3, NOISY, LATE = "INT3", "noise of 1", "bound 16"
SEEDS = {INT3: range(10), NOISY: range(5), LATE: range(5)}
PILOT_SEEDS = (100, 101)
MATCHED, NONE = "matched", "none"
ARMS: dict[str, Mapping[str, Mapping[str, Any]]] = {
    MATCHED: {},
    NONE: {},
    "tis": {"tis": {"cap": 2.0}},
    "is": {"tis": {"cap": 1e9}},
    "centre": {"centre": {}},
    "centre + tis": {"centre": {}, "tis": {"cap": 2.0}},
    "round_as": {},
}
INT3_SPEC = RoundingSpec(rounding="int3")
DRAWN = Draw(most=DIGITS + FREE + 1, top=20, judge=lambda text, own: float(text[:DIGITS] == own))
HELD_OUT = 256
GATE = 0.95  # of matched's entropy, that none must be below on average under INT3
GATE_SEEDS = 5
SOURCES = (
    "rlcore/learner",
    "rlcore/corrections",
    "rlcore/objectives",
    "benchmarks/evidence/late_learner.py",
)
FILE, PILOT_FILE = results("centring"), results("centring_pilot")
START_FOLDER = CLAIMS / "centring-start"


@dataclass(frozen=True)
class Cell:
    """A run. The matched arm samples from the policy itself and belongs to every regime."""

    arm: str
    regime: str
    seed: int

    @property
    def key(self) -> tuple[Any, ...]:
        return self.arm, self.regime, self.seed


@dataclass(frozen=True)
class Pilot:
    """A run of the matched arm at a rate, which ends early where accuracy leaves the gate."""

    rate: float
    seed: int
    arm: str = MATCHED
    regime: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        return self.rate, self.seed


class Looked(NamedTuple):
    """Held-out accuracy, and means over the free tokens of the policy's own answers."""

    accuracy: float
    entropy: float
    kl: float  # to the start


def cells() -> Iterator[Cell]:
    """Every run: what INT3's gate reads, then INT3 seed by seed, then the rest."""
    for seed in range(GATE_SEEDS):
        yield from (Cell(MATCHED, "", seed), Cell(NONE, INT3, seed))
    for regime, seeds in SEEDS.items():
        for seed in seeds:
            gated = regime == INT3 and seed < GATE_SEEDS
            if regime == INT3 and not gated:
                yield Cell(MATCHED, "", seed)
            for arm in ARMS:
                if arm == MATCHED or (arm == NONE and gated):
                    continue
                if arm != "round_as" or regime == INT3:
                    yield Cell(arm, regime, seed)


def held(line: Line) -> bool:
    """Return whether held-out accuracy stayed within the gate throughout."""
    return bool(HOLDS[0] <= line["lowest"] and line["highest"] <= HOLDS[1])


def chosen(found: Sequence[Line]) -> float | None:
    """The largest rate at which every pilot seed ran and stayed within the gate, unless a larger
    one waits for its runs; None if there is none, or none yet."""
    for rate in RATES:
        own = {r["seed"]: held(r) for r in found if r["rate"] == rate}
        if not all(own.values()):
            continue
        return rate if own.keys() == {*PILOT_SEEDS} else None
    return None


def next_pilots(found: Sequence[Line]) -> list[Pilot]:
    """The runs that decide about the largest rate that is not out; none where the rate is known, or
    none holds."""
    for rate in RATES:
        own = [r for r in found if r["rate"] == rate]
        if all(map(held, own)):
            left = {*PILOT_SEEDS} - {r["seed"] for r in own}
            return [Pilot(rate, seed) for seed in sorted(left)]
    return []


def pilots() -> list[Line]:
    """The pilot's lines, of whatever start: a rate once chosen is that of all machines."""
    return lines(PILOT_FILE)


def refuted(found: Sequence[Line]) -> bool:
    """Return whether the gate closes: no rate holds, or drift does not show itself at this size."""
    if chosen(pilots()) is None:
        return True
    pairs = ratios(found, NONE, INT3, "entropy")
    return len(pairs) >= GATE_SEEDS and fmean(pairs[:GATE_SEEDS]) >= GATE


def rounded(lm: Any) -> Any:
    """A copy whose weights are rounded as an INT3 actor's."""
    actor = deepcopy(lm)
    weights = {n: p.detach() for n, p in lm.named_parameters()}
    actor.load_state_dict(round_weights(weights, INT3_SPEC), strict=False)
    return actor


@torch.no_grad()
def look(lm: Any, start: Any) -> Looked:
    """Sample the held-out problems; the same problems and seed of draws each time."""
    asked = late.problems(99, "held out", 0, HELD_OUT, LENGTHS)
    drawn = late.sample(lm, asked, 7, DRAWN)
    whole = [one.ids[: DIGITS + FREE] for one in drawn]
    ids = torch.tensor(
        [p.prompt + o + [END] * (DIGITS + FREE - len(o)) for p, o in zip(asked, whole, strict=True)]
    )
    own, old = (m(input_ids=ids).logits.float().log_softmax(-1) for m in (lm, start))
    first = len(asked[0].prompt) + DIGITS - 1  # predicts the first free token
    on = torch.tensor([[DIGITS + i < len(o) for i in range(FREE)] for o in whole])
    p, q = own[:, first : first + FREE][on], old[:, first : first + FREE][on]
    entropy, kl = -(p.exp() * p).sum(-1), (p.exp() * (p - q)).sum(-1)
    accuracy = fmean(one.reward for one in drawn)
    return Looked(accuracy, float(entropy.mean()), float(kl.mean()))


def accuracy(lm: Any) -> float:
    """Held-out accuracy of a model, of answers drawn at temperature 1."""
    asked = late.problems(99, "held out", 0, HELD_OUT, LENGTHS)
    return fmean(one.reward for one in late.sample(lm, asked, 7, DRAWN))


def make_start(folder: Path) -> None:
    """The model that every run begins from."""
    late.make_start(folder, START, 2000, lengths=LENGTHS, score=accuracy, free=FREE)


def run(cell: Cell | Pilot, model: Path) -> Line:
    """Run a cell and sum it up. `curve`: (step, accuracy, entropy, KL) over the run; `actor`:
    accuracy of the actors that the run ends with. Raises RuntimeError where no rate is chosen."""
    began = time.monotonic()
    rate = cell.rate if isinstance(cell, Pilot) else chosen(pilots())
    if rate is None:
        raise RuntimeError("the pilot has chosen no rate")
    how = DRAWN._replace(noise=NOISE if cell.regime == NOISY else 0.0)
    lag = AGE if cell.regime == LATE else 0
    rank = late.learner(
        model,
        LearnerSpec(lr=rate, lr_warmup_steps=3, betas=(0.9, 0.95), step_bound=None),
        STEPS,
        cell.seed,
        lag=lag,
        corrections=ARMS[cell.arm],
        how=how,
        rounding=INT3_SPEC if cell.arm == "round_as" else None,
    )
    lm = rank.engine.policy.lm
    start = deepcopy(lm).eval()

    def actor() -> Any:
        return rounded(lm) if cell.regime == INT3 else lm

    def sampled(number: int, version: int) -> list[Any]:
        return late.batch(actor(), cell.seed, number, version, LENGTHS, how)

    curve, kls, drifts = [(0, *look(lm, start))], [], []
    for step, _, row in late.late_steps(rank, STEPS, lag, 1, sampled):
        kls.append(row["mismatch/kl_k3"])
        drifts.append(row.get("mismatch/drift"))
        curve += [(step, *look(lm, start))] if step % EVERY == 0 else []
        if isinstance(cell, Pilot) and not HOLDS[0] <= curve[-1][1] <= HOLDS[1]:
            break
    known = [d for d in drifts if d is not None]
    last = Looked(*curve[-1][1:])
    return {
        **asdict(cell),
        "rate": rate,
        **last._asdict(),
        "actor": accuracy(actor()),
        "lowest": min(point[1] for point in curve),
        "highest": max(point[1] for point in curve),
        "drift": fmean(known) if known else None,
        "mismatch": fmean(kls),
        "curve": curve,
        "start": start_digest(model),
        "seconds": round(time.monotonic() - began, 1),
        "machine": machine(),
        "sources": source_digest(ROOT, SOURCES),
    }


# ----- what was predicted -----


def of(found: Sequence[Line], arm: str, regime: str) -> dict[int, Line]:
    """Lines by seed."""
    wanted = "" if arm == MATCHED else regime
    return {r["seed"]: r for r in found if (r["arm"], r["regime"]) == (arm, wanted)}


def ratios(found: Sequence[Line], arm: str, regime: str, name: str) -> list[float]:
    """A figure of an arm over the matched arm's, by seed."""
    own, matched = of(found, arm, regime), of(found, MATCHED, regime)
    return [own[s][name] / matched[s][name] for s in sorted(own.keys() & matched.keys())]


def gaps(found: Sequence[Line], arm: str, other: str, regime: str, name: str) -> list[float]:
    """A figure of an arm less another's, by seed."""
    one, two = of(found, arm, regime), of(found, other, regime)
    return [one[s][name] - two[s][name] for s in sorted(one.keys() & two.keys())]


class Prediction(NamedTuple):
    """A statement: values by seed lie between `low` and `high`."""

    said: str
    values: list[float]
    low: float
    high: float
    seeds: int  # before so many it is not judged

    def verdict(self) -> str:
        if len(self.values) < self.seeds:
            return f"not judged ({len(self.values)} of {self.seeds} seeds)"
        mean, low, high = interval(self.values)
        inside = self.low <= low and high <= self.high
        outside = high < self.low or low > self.high
        word = "supported" if inside else "refuted" if outside else "open"
        return f"{word}: {mean:.3f} [{low:.3f}, {high:.3f}]"


def predictions(found: Sequence[Line]) -> list[Prediction]:
    """The registered statements."""
    inf = float("inf")

    def entropy(arm: str, regime: str, low: float, high: float) -> Prediction:
        said = f"{regime}: entropy of {arm} over matched's in [{low:g}, {high:g}]"
        seeds = len(SEEDS[regime])
        return Prediction(said, ratios(found, arm, regime, "entropy"), low, high, seeds)

    def above(arm: str, other: str, regime: str, name: str, low: float, high: float) -> Prediction:
        bounds = f"in [{low:g}, {high:g}]"
        said = f"{regime}: {name} of {arm} less that of {other} {bounds}"
        seeds = len(SEEDS[regime])
        return Prediction(said, gaps(found, arm, other, regime, name), low, high, seeds)

    return [
        entropy(NONE, INT3, 0.0, 0.7),
        entropy("centre", INT3, 0.9, 1.1),
        entropy("centre + tis", INT3, 0.9, 1.1),
        entropy("tis", INT3, 0.75, 0.97),
        above("centre + tis", "tis", INT3, "accuracy", -0.05, inf),
        above("centre + tis", NONE, INT3, "accuracy", 0.05, inf),
        above("centre", "tis", INT3, "actor", 0.05, inf),
        *(
            above(arm, NONE, NOISY, "accuracy", -0.05, 0.05)
            for arm in ("tis", "is", "centre", "centre + tis")
        ),
        entropy(NONE, LATE, 0.0, 0.8),
        entropy("centre", LATE, 0.95, inf),
    ]


def tables(found: Sequence[Line]) -> list[str]:
    """Means over seeds by arm, a table for each regime that has runs, and the statements."""
    made = []
    for regime in SEEDS:
        rows = []
        for arm in ARMS:
            own = list(of(found, arm, regime).values())
            if not own:
                continue
            names = ("entropy", "kl", "accuracy", "actor", "mismatch")
            means = {name: f"{fmean(r[name] for r in own):.3f}" for name in names}
            drifts = [r["drift"] for r in own if r["drift"] is not None]
            drift = f"{fmean(drifts):.2f}" if drifts else ""
            rows.append({regime: arm, "seeds": str(len(own)), **means, "drift": drift})
        made += [table(rows)] if len(rows) > 1 else []
    said = [{"statement": p.said, "verdict": p.verdict()} for p in predictions(found)]
    off = sum(not held(r) for r in found)
    gate = f"{off} of {len(found)} runs left the gate's accuracy of 0.4 to 0.8."
    return [*pilot_table(pilots()), *made, table(said), gate]


def pilot_table(found: Sequence[Line]) -> list[str]:
    """The pilot's runs, and the rate that they choose."""
    rows = [
        {
            "pilot's rate": f"{r['rate']:g}",
            "seed": str(r["seed"]),
            "steps": str(r["curve"][-1][0]),
            "accuracy": f"{r['lowest']:.3f} to {r['highest']:.3f}",
            "within the gate": "yes" if held(r) else "no",
        }
        for r in found
    ]
    rate = chosen(found)
    left = "a rate is still to be chosen" if next_pilots(found) else "no rate holds"
    said = f"The pilot chose a rate of {rate:g}." if rate else f"Of the pilot: {left}."
    return [*([table(rows)] if rows else []), said]


PILOT = Study(
    name="centring_pilot",
    file=PILOT_FILE,
    page=PAGES / "centring.md",
    start=START_FOLDER,
    make_start=make_start,
    cells=lambda: iter(next_pilots(pilots())),
    run=run,
    key=lambda line: (line["rate"], line["seed"]),
    tables=pilot_table,
    sources=SOURCES,
)
STUDY = Study(
    name="centring",
    file=FILE,
    page=PAGES / "centring.md",
    start=START_FOLDER,
    make_start=make_start,
    cells=cells,
    run=run,
    key=lambda line: (line["arm"], line["regime"], line["seed"]),
    tables=tables,
    part=lambda key: key[-1],  # runs are compared by seed
    stopped=refuted,
    sources=SOURCES,
    pilot=PILOT,
)

if __name__ == "__main__":
    STUDY.main(__doc__)
