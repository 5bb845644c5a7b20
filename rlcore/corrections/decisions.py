"""The decision table: which correction a measured regime calls for, and why. Data in
`decisions.yaml`; no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml

from rlcore.spec import Spec

Bounds = tuple[float | None, float | None]


class Regime(Spec):
    """One entry. Example: Regime(topic="floor", regime="a floor of probabilities", when=
    {"floor_tokens": (2.0, None)}, use=("dvp",), remedy="correction=[dvp]", effect="...",
    measured="5 seeds", status="exact world", source="estimator-lab")"""

    topic: str  # one entry of a topic is given
    regime: str
    when: dict[str, Bounds]
    use: tuple[str, ...]  # corrections by name; empty: none is called for
    remedy: str
    effect: str
    measured: str  # the setting and the seeds
    status: Literal[
        "shown after Holm",
        "registered and supported",
        "exact world",
        "open after Holm",
        "not finished",
    ]
    source: str  # the page of benchmarks/results/evidence that shows it

    def holds(self, figures: Mapping[str, float]) -> bool:
        return all(
            name in figures and _within(figures[name], *bounds)
            for name, bounds in self.when.items()
        )

    def said(self, figures: Mapping[str, float]) -> str:
        """The row as a sentence, with the figures that it holds for."""
        found = ", ".join(f"{name} {figures[name]:.3g}" for name in self.when)
        holds = f"{self.regime} ({found})" if found else self.regime
        shown = f"{self.measured}; {self.status}; docs/evidence.md: {self.source}"
        return f"{holds}: {self.remedy}. {self.effect[0].upper()}{self.effect[1:]} ({shown})."


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
