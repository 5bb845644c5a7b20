"""The limit of a run on CPUs: the time that its matrix products alone would need.

A pass takes 2 floating-point operations (FLOP) a parameter and token, one with its gradient 6.
Engines sample each token and read each group's prompt once; the learner computes every position of
every sequence, and p_ref's where it has a pass for them. Other models, such as a critic, are not
counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.metrics.rows import Row

PASS, TRAINED = 2, 6  # FLOPs a parameter and token: of a pass, and of one with its gradient
WARM_UP = 3  # first rows that are left out: caches fill, pipelines too
NAMES = ("train/tokens", "train/sequence_positions", "time/step_s")


def limit_s(facts: Mapping[str, Any], row: Row) -> float | None:
    """Seconds that the products of a row's step need at the speed of this machine's trial; None
    where the row lacks something. `facts`: "limit" of a run's about.json."""
    tokens, positions = row.get("train/tokens"), row.get("train/sequence_positions")
    if tokens is None or positions is None:
        return None
    prompts = max(0.0, positions - tokens) / facts["samples"]
    one_pass = facts["pass_gflop"]
    trained = facts["trained_gflop"] + one_pass * bool(row.get("time/learner_ref_s"))
    return float((one_pass * (tokens + prompts) + trained * positions) / facts["gflops"])


def limit_share(about: Mapping[str, Any], rows: Sequence[Row], warm_up: int = WARM_UP) -> float:
    """Limit over time, of all steps that are neither the first ones nor the last; 0: unknown."""
    facts = about.get("limit")
    if not isinstance(facts, Mapping):
        return 0.0
    steady = [row for row in rows[warm_up:-1] if all(row.get(n) is not None for n in NAMES)]
    needed = sum(limit_s(facts, row) or 0.0 for row in steady)
    taken = sum(float(row["time/step_s"] or 0.0) for row in steady)
    return needed / taken if taken else 0.0


def sentence(share: float) -> str:
    """A line for people; "" where the share is unknown."""
    if not share:
        return ""
    return (
        f"limit / step {share:.2f}: the matrix products of engines and learner would take that "
        "share of a step on all cores"
    )
