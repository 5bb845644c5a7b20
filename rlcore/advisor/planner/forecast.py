"""The forecast of a fleet: throughput, staleness and the waits of each role; and the search for the
best division of GPUs between actors and learner."""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rlcore.advisor.planner.run import PlannedFleet, PlannedRun
from rlcore.advisor.simulate.clock import run_simulated

WARM_UP = 0.25  # share of the steps that is not counted: pipelines fill
IDLE = 0.15  # a role that waits for less of the time is the bottleneck


@dataclass(frozen=True, slots=True)
class Forecast:
    """Steady state of a run, means over its middle steps.

    Example: Forecast(step_s=2.0, rollout_tokens_per_s=4e3, train_tokens_per_s=4e3,
    staleness_mean=1.1, staleness_p90=2.0, staleness_max=2.0, actors_idle=0.3, learner_idle=0.0,
    graders_idle=0.9, replacements=0)
    """

    step_s: float
    rollout_tokens_per_s: float  # that arrived, over all actors
    train_tokens_per_s: float  # that were trained on, by wall time
    staleness_mean: float  # optimizer steps, over trained tokens
    staleness_p90: float
    staleness_max: float
    actors_idle: float  # share of the time that the mean actor decodes nothing
    learner_idle: float  # share of the time that the learner does not train
    graders_idle: float  # share of the time that the mean node's graders have nothing to grade
    replacements: int  # of actors, over the whole run
    teacher_idle: float = 1.0  # share of the time that a teacher's engines have nothing to score

    @property
    def bottleneck(self) -> str:
        """The name of the role that the others wait for."""
        idle = {
            "learner": self.learner_idle,
            "actors": self.actors_idle,
            "graders": self.graders_idle,
            "teacher": self.teacher_idle,
        }
        least = min(idle, key=lambda role: idle[role])
        return least if idle[least] <= IDLE else "turns"  # each waits for the others

    def as_row(self) -> dict[str, float | str]:
        """For JSON."""
        return {**asdict(self), "bottleneck": self.bottleneck}


def forecast(fleet: PlannedFleet) -> Forecast:
    """Simulate the run and measure its middle steps; at both ends of its schedule are
    `max_staleness` further ones.

    Raises what would end the run, such as StageError when actors die too often; ValueError for a
    schedule too short to have such steps.
    """
    with tempfile.TemporaryDirectory(prefix="rlcore-plan-") as folder, _uncollected():
        return run_simulated(_simulated(fleet, Path(folder)), limit_s=1e9)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's cyclic collector, which would examine all objects of a fleet again and
    again, for more time than the rest takes, and free nothing: a forecast drops no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


async def _simulated(fleet: PlannedFleet, folder: Path) -> Forecast:
    run = PlannedRun(fleet, folder)
    await run.run(run.failing if fleet.rates.failures_per_day else None)
    return _steady(run)


def _steady(run: PlannedRun) -> Forecast:
    rows, marks, planned = run.reporter.rows, run.reporter.marks, run.planned
    # Actors sample ahead before the first steps, and less and less before the last ones; the very
    # last row waits for an evaluation.
    ahead = planned.schedule.max_staleness
    last = len(rows) - 2 - ahead
    if last < 1:
        raise ValueError(f"{len(rows)} steps are too few to measure with max_staleness={ahead}")
    first = min(max(int(len(rows) * WARM_UP), ahead), last - 1)
    later = rows[first + 1 : last + 1]
    seconds = marks[last][0] - marks[first][0]
    busy, scored = (marks[last][role] - marks[first][role] for role in (1, 2))
    trained = sum(float(r["train/tokens"]) for r in later)
    sequences = sum(float(r["train/sequences"]) for r in later)
    learned = sum(float(r["time/learn_s"]) for r in later)
    arrived = sum(
        float(r["throughput/rollout_tokens_per_s"]) * float(r["time/step_s"]) for r in later
    )

    def mean(name: str) -> float:
        return sum(float(r[name]) for r in later) / len(later)

    return Forecast(
        step_s=seconds / len(later),
        rollout_tokens_per_s=arrived * planned.unit / seconds,
        train_tokens_per_s=trained / seconds,
        staleness_mean=mean("staleness/mean"),
        staleness_p90=mean("staleness/p90"),
        staleness_max=max(float(r["staleness/max"]) for r in later),
        actors_idle=1.0 - busy / (seconds * sum(planned.actors.values())),
        learner_idle=1.0 - learned / seconds,
        graders_idle=1.0 - sequences * planned.rates.grade_s / (seconds * planned.nodes),
        replacements=int(rows[-1]["rollout/replacements"]),
        teacher_idle=1.0 - scored / seconds,
    )


STATE_BYTES = 18  # a parameter: bfloat16 with its gradient, and AdamW's in float32
STATE_SHARE = 0.8  # of a GPU's memory that they may take: activations need the rest
_FINENESS = 32  # the search stops at steps of this share of the actors


@dataclass(frozen=True, slots=True)
class Split:
    """One division. Example: Split(ranks=16, actors=24, forecast=...) of 64 GPUs, two an actor"""

    ranks: int  # of the learner, one GPU each
    actors: int
    forecast: Forecast


def least_ranks(parameters: float, memory_gib: float) -> int:
    """The least ranks that can hold the learner's state, sharded among all (ZeRO-3)."""
    return max(1, math.ceil(STATE_BYTES * parameters / (memory_gib * 2**30 * STATE_SHARE)))


def searched(
    gpus: int, each: int, least: int, simulate: Callable[[int, int], Forecast]
) -> list[Split]:
    """The divisions that were tried, by their number of actors.

    `each`: GPUs of an actor; the learner gets all others, at least `least`. A coarse grid, then
    steps of half the width about the best: throughput rises with the number of actors until they
    are no longer the bottleneck, and falls from there. `simulate(ranks, actors)`. Raises ValueError
    where no actor is left.
    """
    most = (gpus - least) // each
    if most < 1:
        raise ValueError(f"{least} for the learner and {each} for an actor are more than {gpus}")
    tried: dict[int, Split] = {}

    def attempt(actors: int) -> None:
        if 1 <= actors <= most and actors not in tried:
            ranks = gpus - each * actors
            tried[actors] = Split(ranks, actors, simulate(ranks, actors))

    width = max(1, most // 4)
    for actors in range(width, most + 1, width):
        attempt(actors)
    while width > max(1, most // _FINENESS):
        width = max(1, width // 2)
        middle = best_of(list(tried.values())).actors
        attempt(middle - width)
        attempt(middle + width)
    return [tried[actors] for actors in sorted(tried)]


def best_of(splits: Sequence[Split]) -> Split:
    """The division that trains on most tokens a second; of equal ones the one with fewer actors."""
    return max(splits, key=lambda s: (s.forecast.train_tokens_per_s, -s.actors))
