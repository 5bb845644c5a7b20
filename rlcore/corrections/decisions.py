"""The decision table: which correction a measured regime calls for, and why. Data in
`decisions.yaml`; no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from rlcore.spec import Spec

Bounds = tuple[float | None, float | None]


class Regime(Spec):
    """One entry. Example: Regime(topic="floor", regime="a floor of probabilities", when=
    {"floor_tokens": (2.0, None)}, use=("dvp", "tis"), because="...", source="estimator-lab")"""

    topic: str  # one entry of a topic is given
    regime: str
    when: dict[str, Bounds]
    use: tuple[str, ...]  # corrections by name; empty: none is called for
    because: str
    source: str  # the page of benchmarks/results/evidence that shows it

    def holds(self, figures: Mapping[str, float]) -> bool:
        return all(
            name in figures and _within(figures[name], *bounds)
            for name, bounds in self.when.items()
        )


def _within(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


@cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(
        (files("rlcore.corrections") / "decisions.yaml").read_text()
    )
    return found


@cache
def regimes() -> tuple[Regime, ...]:
    """All entries, in the order in which they are tried."""
    return tuple(Regime.model_validate(entry) for entry in _table()["regimes"])


def regimes_of(figures: Mapping[str, float]) -> tuple[Regime, ...]:
    """The first entry of each topic that holds for these figures."""
    found: dict[str, Regime] = {}
    for entry in regimes():
        if entry.topic not in found and entry.holds(figures):
            found[entry.topic] = entry
    return tuple(found.values())


def typical_n_star(tokens: float) -> float:
    """N* in answers of a fixed error, for answers of this many tokens: a value of the lab for
    rounding errors, interpolated by the logarithm of the length. It stands for a run's own
    (`break_even.BreakEven`) before that is known."""
    (short, many), (long, few) = sorted(_table()["n_star"].items())
    share = math.log(max(tokens, 1.0) / short) / math.log(long / short)
    return float(many * (few / many) ** min(max(share, 0.0), 1.0))
