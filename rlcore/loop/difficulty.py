"""Difficulty pools: the pass rate of each problem is remembered, and problems that teach nothing,
because all samples pass or none does, are passed over most of the times that their turn comes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcore.loop.specs import DifficultySpec
from rlcore.seeding import derive_seed

SEEDS = 1 << 63  # `derive_seed` is below


class Difficulty:
    """What is remembered of one task's problems, by their index.

    Whether a problem is passed over depends on (seed, cursor) and on what is remembered, never on
    timing; a problem that was not seen yet is always drawn.
    """

    def __init__(self, spec: DifficultySpec, run_seed: int) -> None:
        self.spec = spec
        self.rates: dict[int, float] = {}
        self._seed = run_seed

    def draws(self, index: int, cursor: int) -> bool:
        """Whether problem `index`, whose turn comes at `cursor`, is drawn."""
        rate = self.rates.get(index)
        if rate is None or self.spec.hopeless < rate < self.spec.solved:
            return True
        return derive_seed(self._seed, "difficulty", cursor) < self.spec.keep * SEEDS

    def note(self, index: int, rate: float) -> None:
        """Remember the pass rate of a problem's newest group."""
        self.rates[index] = rate

    def metrics(self) -> dict[str, float]:
        """Numbers of problems, by pool."""
        solved = sum(rate >= self.spec.solved for rate in self.rates.values())
        hopeless = sum(rate <= self.spec.hopeless for rate in self.rates.values())
        return {
            "seen": float(len(self.rates)),
            "solved": float(solved),
            "hopeless": float(hopeless),
        }

    def state(self) -> dict[str, float]:
        """As JSON, whose keys are text."""
        return {str(index): rate for index, rate in self.rates.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self.rates = {int(index): float(rate) for index, rate in state.items()}
