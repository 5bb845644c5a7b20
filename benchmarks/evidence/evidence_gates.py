"""Gates of registered studies, judged from the lines of their runs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.evidence.evidence_held import over_steps, second_half
from benchmarks.evidence.evidence_tables import LEAST, Line

Value = Callable[[Sequence[Line]], float | None]


@dataclass(frozen=True)
class Bound:
    """A value of a study and the interval that it must lie in; None is no bound."""

    value: Value
    at_least: float | None = None
    at_most: float | None = None

    def holds(self, lines: Sequence[Line]) -> bool | None:
        """None while runs are missing."""
        found = self.value(lines)
        if found is None:
            return None
        low = self.at_least is None or found >= self.at_least
        return low and (self.at_most is None or found <= self.at_most)


@dataclass(frozen=True)
class Gate:
    """What must hold for a study to say anything about its hypotheses. Without bounds, the study's
    page judges it."""

    text: str
    bounds: tuple[Bound, ...] = ()

    def met(self, lines: Sequence[Line]) -> bool | None:
        """None where runs are missing or the gate has no bounds."""
        held = [bound.holds(lines) for bound in self.bounds]
        if False in held:
            return False
        return None if not held or None in held else True


def mean(arm: str, size: str, of: Callable[[Line], float | None]) -> Value:
    """The mean over an arm's runs at a size; None of fewer than three."""

    def value(lines: Sequence[Line]) -> float | None:
        own = [line for line in lines if (line.get("arm"), line.get("size")) == (arm, size)]
        found = [v for line in own if (v := of(line)) is not None]
        return float(np.mean(found)) if len(found) >= LEAST else None

    return value


def ratio(over: Value, under: Value) -> Value:
    return _both(over, under, lambda a, b: a / b if b else None)


def difference(value: Value, other: Value) -> Value:
    return _both(value, other, lambda a, b: a - b)


def _both(a: Value, b: Value, join: Callable[[float, float], float | None]) -> Value:
    def value(lines: Sequence[Line]) -> float | None:
        one, other = a(lines), b(lines)
        return None if one is None or other is None else join(one, other)

    return value


def over(name: str) -> Callable[[Line], float | None]:
    """A watched metric over the steps of a run."""
    return lambda line: over_steps(line, name)


def late(name: str) -> Callable[[Line], float | None]:
    """A watched metric over the second half of a run."""
    return lambda line: second_half(line, name)


def first(name: str) -> Callable[[Line], float | None]:
    """A watched metric up to a run's first evaluation, which is its first step's."""

    def of(line: Line) -> float | None:
        values: Sequence[float | None] = line.get("watched", {}).get(name) or (None,)
        return values[0]

    return of


def seconds(line: Line) -> float | None:
    """Of training."""
    clock: Sequence[float] = line["clock"]
    return clock[-1]
