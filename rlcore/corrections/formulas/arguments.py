"""Checks of what a caller passes: plain comparisons of numbers and shapes, never of tensor values,
so that no check waits for a device."""

from __future__ import annotations

from torch import Tensor

from rlcore.errors import UserError


class InvalidArgument(UserError, ValueError):
    """An argument outside what its function accepts; the message names the argument."""


def choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise InvalidArgument unless `value` is one of the choices."""
    if value not in choices:
        raise InvalidArgument(
            f"{name}={value!s} is not accepted; choose one of: {', '.join(choices)}."
        )


def require(condition: bool, sentence: str) -> None:
    """Raise InvalidArgument with the sentence unless the condition holds."""
    if not condition:
        raise InvalidArgument(sentence)


def at_least_one(name: str, cap: float) -> None:
    """A cap on a ratio must leave ratio 1 alone, or matched distributions would be corrected."""
    require(
        cap >= 1.0,
        f"{name}={cap} is not accepted: it caps a ratio that is 1 without mismatch, so it must be "
        ">= 1.",
    )


def positive(name: str, value: float) -> None:
    """Raise InvalidArgument unless the value is above 0."""
    require(value > 0.0, f"{name}={value} is not accepted: it must be > 0.")


def same_shape(**tensors: Tensor) -> None:
    """Raise InvalidArgument, naming the first that differs, unless all shapes are equal."""
    (first, expected), *others = tensors.items()
    for name, tensor in others:
        require(
            tensor.shape == expected.shape,
            f"{name} has shape {list(tensor.shape)}, and {first} has {list(expected.shape)}: they "
            "must be equal.",
        )
