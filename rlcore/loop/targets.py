"""Set-points of the mismatch: a slow controller moves the admitted staleness so that a statistic of
the actors' tokens stays at its target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcore.loop.specs import TargetSpec

STATISTICS = {"p05": "mismatch/agreement_p5"}
_MOVED = 0.6  # of a step between the place of the controller and the bound in force, to change it


class AdmittedStaleness:
    """The staleness that admission allows, between each target's `least` and the schedule's bound.

    The place u of a target is an integral: at a step whose statistic s is further than `band` from
    the target value,

        u <- clip(u + rate (most - least) clip((s - value)/(1 - value), -1, 1), least, most)

    starting at `most`. The bound in force is an integer that follows u once they differ by more
    than 0.6, so that a statistic near its target does not make it swing; among several targets the
    least holds. A step without a token of a kind moves nothing. Lowering the bound discards
    nothing: groups that were admitted keep their deadlines.
    """

    def __init__(
        self,
        targets: Mapping[str, TargetSpec],
        most: int,
        *,
        several: bool,
        state: Mapping[str, Any],
    ) -> None:
        """`targets`: by label of actors; `several`: the run has further labels; `state`: of a
        checkpoint, or empty."""
        self._targets = dict(targets)
        self._most = most
        self._several = several
        self._seen: dict[str, float] = {}
        self._places: dict[str, float] = {}
        self._bounds: dict[str, int] = {}
        for label, target in targets.items():
            place, bound = state.get(label, (most, most))
            least = min(target.least, most)
            self._places[label] = min(max(float(place), least), most)
            self._bounds[label] = min(max(int(bound), least), most)

    @property
    def bound(self) -> int | None:
        """The staleness in force; None without a target."""
        return min(self._bounds.values(), default=None)

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of a step."""
        for label, target in self._targets.items():
            name = STATISTICS[target.statistic]
            found = metrics.get(f"{name}@{label}" if self._several else name)
            if found is not None:
                self._move(label, target, found)

    def _move(self, label: str, target: TargetSpec, found: float) -> None:
        self._seen[label] = found
        error = (found - target.value) / (1.0 - target.value)
        least = min(target.least, self._most)
        if abs(found - target.value) > target.band:
            step = target.rate * (self._most - least) * min(max(error, -1.0), 1.0)
            self._places[label] = min(max(self._places[label] + step, least), self._most)
        if abs(self._places[label] - self._bounds[label]) > _MOVED:
            self._bounds[label] = round(self._places[label])

    def metrics(self) -> dict[str, float]:
        """`control/<label>/...`: the statistic, and the staleness that its target admits."""
        found = {f"control/{label}/statistic": value for label, value in self._seen.items()}
        return found | {f"control/{label}/staleness": float(n) for label, n in self._bounds.items()}

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {label: [self._places[label], self._bounds[label]] for label in self._targets}
