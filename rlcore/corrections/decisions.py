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
_LEAST_SHARE = 0.01  # that a step can tell from 0
_REPEATED = 100  # tokens that tell fixed errors from fresh ones


class Regime(Spec):
    """One entry. Example: Regime(topic="floor", regime="a floor of probabilities", when=
    {"floor_tokens": (2.0, None)}, use=("dvp", "tis"), because="...", source="estimator-lab")"""

    topic: str  # one entry of a topic is given
    regime: str
    when: dict[str, Bounds]
    use: tuple[str, ...]  # corrections by name; empty: none is called for
    because: str
    source: str  # the page of docs/evidence that shows it

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


def settled_share(figures: Mapping[str, float]) -> float:
    """The share of an error that repeats, from "fixed_share", "repeated_share" and "tokens" of a
    step; 1, a fixed error, where it is of fewer than a hundred tokens, which say little."""
    repeated = figures.get("tokens", 0.0) * figures.get("repeated_share", 0.0)
    return figures.get("fixed_share", 1.0) if repeated >= _REPEATED else 1.0


def typical_n_star(tokens: float, fixed_share: float = 1.0) -> float:
    """N* in answers, for answers of this many tokens and an error of which `fixed_share` repeats
    (`regimes.fixed_share`): bias comes from the fixed part alone, variance from all of it.

    A value of the lab for rounding errors, interpolated by the logarithm of the length, over the
    share. In the lab that holds at 8 tokens for shares down to 0.05; at 64 N* is three to four
    times as large. A network has an N* of its own, which `functional.batch_worth_correcting`
    estimates from its gradients."""
    (short, many), (long, few) = sorted(_table()["n_star"].items())
    share = math.log(max(tokens, 1.0) / short) / math.log(long / short)
    return float(many * (few / many) ** min(max(share, 0.0), 1.0)) / max(fixed_share, _LEAST_SHARE)
