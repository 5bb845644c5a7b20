"""Every metric of a run by name, and how the values of several steps become one.

The declarations are in the files `*_metrics.py` of this folder, each with unit, meaning, reduction,
usual range and advice; docs/metrics.md is made from them. Angle brackets stand for a name that a
run's configuration or a user's code gives, so `eval/<task>/mean@<k>` covers `eval/digits/mean@4`. A
metric of samples exists by kind of actors, too: `mismatch/ess@fp8`. Units and reductions are
declared, never inferred from a name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from rlcore.metrics.learner_metrics import LEARNER_METRICS
from rlcore.metrics.metric import Metric
from rlcore.metrics.mismatch_metrics import MISMATCH_METRICS
from rlcore.metrics.sample_metrics import SAMPLE_METRICS
from rlcore.metrics.system_metrics import SYSTEM_METRICS
from rlcore.spec import Reduction

Value = TypeVar("Value")

METRICS: tuple[Metric, ...] = (
    *SAMPLE_METRICS,
    *MISMATCH_METRICS,
    *LEARNER_METRICS,
    *SYSTEM_METRICS,
)
ACCURACIES = {f"eval/<task>/{n}" for n in ("greedy", "mean@<k>", "pass@<k>", "majority@<k>")}
# Looked up for every value of every row, and a family is matched segment by segment.
_EXACT = {m.name: m for m in METRICS if "<" not in m.name}
_FAMILIES = tuple(m for m in METRICS if "<" in m.name)


@lru_cache(maxsize=8192)
def declared(name: str) -> Metric | None:
    """The declaration of a name: its own, else a family's; None if it has none."""
    pooled, kind = split_kind(name)
    if kind:
        return declared(pooled)
    return _EXACT.get(name) or next((m for m in _FAMILIES if m.covers(name)), None)


@lru_cache(maxsize=8192)
def split_kind(name: str) -> tuple[str, str]:
    """("mismatch/ess", "fp8") of "mismatch/ess@fp8"; ("eval/digits/mean@4", "") of a name that is
    of no kind of actors."""
    pooled, _, kind = name.rpartition("@")
    metric = declared(pooled) if pooled else None
    return (pooled, kind) if metric is not None and metric.by_kind and kind else (name, "")


def split_row(row: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, Value]]:
    """The columns of metrics.jsonl and of details.jsonl; both have the step."""
    brief: dict[str, Value] = {}
    details = {"step": row["step"]} if "step" in row else {}
    for name, value in row.items():
        metric = declared(name)
        (details if metric is not None and metric.detail else brief)[name] = value
    return brief, details


def is_accuracy(name: str) -> bool:
    """Return whether a metric is a held-out accuracy."""
    metric = declared(name)
    return metric is not None and metric.name in ACCURACIES


def size_of(accuracy: str) -> str:
    """The metric of the independent answers that would be as uncertain as a held-out accuracy."""
    task, _, statistic = accuracy.rpartition("/")
    return f"{task}/effective_{statistic}"


def combine(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Several steps as one row, each name by its declared reduction, ignoring missing and null
    values.

    Raises ValueError for an undeclared name.
    """
    combined: dict[str, float] = {}
    for name in dict.fromkeys(n for row in rows for n in row):
        values = [v for row in rows if (v := row.get(name)) is not None]
        metric = declared(name)
        if metric is None:
            raise ValueError(f"metric {name!r} is not declared in rlcore.metrics")
        if values:
            combined[name] = _reduce(metric.reduction, values)
    return combined


def _reduce(how: Reduction, values: Sequence[float]) -> float:
    match how:
        case "mean":
            return math.fsum(values) / len(values)
        case "sum":
            return math.fsum(values)
        case "max":
            return max(values)
        case "min":
            return min(values)
        case "last":
            return values[-1]
