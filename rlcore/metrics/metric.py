"""What is declared of one metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reduction = Literal["mean", "sum", "max", "min", "last"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One declared metric. `reduction` combines the values of several steps (a summary, a thinned
    curve).

    Example: Metric("time/publish_s", "s", "publishing weights", "sum")
    """

    name: str
    unit: str
    meaning: str
    reduction: Reduction = "mean"

    def covers(self, name: str) -> bool:
        """Whether this declaration is about `name`, segment by segment."""
        mine, theirs = self.name.split("/"), name.split("/")
        return len(mine) == len(theirs) and all(_covers(m, t) for m, t in zip(mine, theirs))


def _covers(template: str, segment: str) -> bool:
    literal, bracket, _ = template.partition("<")
    return (
        segment.startswith(literal) and len(segment) > len(literal)
        if bracket
        else segment == template
    )
