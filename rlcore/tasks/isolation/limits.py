"""Limits of isolated graders, from a task's arguments."""

from __future__ import annotations

from rlcore.tasks.arguments import ArgumentError
from rlcore.tasks.code import confining_layers
from rlcore.tasks.isolation import Limits


def answer_limits(
    task: str, timeout_s: object, confinement: str, rule: str = "arithmetic"
) -> Limits:
    """The limits of one answer. Raises ArgumentError for a machine that cannot confine by every
    layer, unless `confinement` is "reduced"."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s <= 0:
        raise ArgumentError(
            "timeout_s", timeout_s, "is not accepted: give a number of seconds above 0."
        )
    layers = confining_layers(f"task {task}", confinement)
    return Limits(timeout_s=float(timeout_s), rule=rule, layers=layers)
