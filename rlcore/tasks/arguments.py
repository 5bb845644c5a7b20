"""Checks of a task's arguments, so that an invalid one is refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterable

from rlcore.errors import UserError


class ArgumentError(UserError):
    """A task argument that is not accepted; `make_task` prepends the config key of the task."""

    def __init__(self, name: str, value: object, why: str) -> None:
        self.name = name
        self.value = value
        self.why = why
        super().__init__(self.sentence("task.args"))

    def sentence(self, prefix: str) -> str:
        return f"{prefix}.{self.name}={self.value} {self.why}"


def integer(name: str, value: object, low: int, high: int) -> int:
    """`value` if it is an int within [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ArgumentError(name, value, f"is not accepted: give an integer from {low} to {high}.")
    return value


def share(name: str, value: object) -> float:
    """`value` as a float within [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ArgumentError(name, value, "is not accepted: give a number from 0 to 1.")
    return float(value)


def one_of(name: str, value: object, choices: Iterable[str]) -> str:
    """`value` if it is one of the choices."""
    listed = list(choices)
    if not isinstance(value, str) or value not in listed:
        raise ArgumentError(name, value, f"is not accepted; choose one of: {', '.join(listed)}.")
    return value
