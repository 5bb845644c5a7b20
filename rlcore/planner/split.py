"""The best division of a number of GPUs between actors and learner, found by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlcore.planner.forecast import Forecast

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
    """Ranks that hold the learner's state, sharded among all (ZeRO-3)."""
    return max(1, math.ceil(STATE_BYTES * parameters / (memory_gib * 2**30 * STATE_SHARE)))


def searched(
    gpus: int, each: int, least: int, simulate: Callable[[int, int], Forecast]
) -> list[Split]:
    """The divisions that were tried, by their number of actors.

    `each`: GPUs of an actor; the learner gets all others, at least `least`. A coarse grid, then
    steps of half the width about the best: throughput rises with actors until they are no longer
    what the others wait for, and falls from there. `simulate(ranks, actors)`. Raises ValueError
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
    """The one that trains on most tokens a second; of equal ones that with fewer actors."""
    return max(splits, key=lambda s: (s.forecast.train_tokens_per_s, -s.actors))
