"""What an engine asks of parameters that several ranks hold in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Parts(Protocol):
    """Which parameters are parts, and their whole tensors. What makes whole tensors is
    collective."""

    #: of torch's: the ranks that hold all parts of a tensor together
    group: Any

    def shape(self, p: Tensor) -> torch.Size:
        """Of the whole parameter."""

    def whole(self, p: Tensor, read: Callable[[Any], Tensor]) -> Tensor:
        """All ranks' parts of what `read` gives for what is held of a parameter, in its shape."""

    def own(self, p: nn.Parameter, whole: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """(parameter held here, its part of a whole tensor)."""

    def squares(self, pairs: Iterator[tuple[Tensor, Tensor]], *, all_held: bool) -> Tensor:
        """Sum of squares of gradients (parameter, gradient), whose sum over ranks counts every
        entry once: over those of `group` if `all_held`, when a rank has whole gradients of what it
        holds, and over all ranks where ZeRO has divided them."""


def gradients_of(optimizer: Any, model: nn.Module) -> Iterator[Any]:
    """(parameter, gradient that this rank holds) of DeepSpeed's optimizer; without one, of the
    model's parameters themselves."""
    if hasattr(optimizer, "fp32_groups_gradients"):
        for params, grads in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients):
            yield from zip(params, grads)
    elif hasattr(optimizer, "averaged_gradients"):
        for i, grads in optimizer.averaged_gradients.items():
            held = (g for g in grads if not getattr(g, "_zero_padding", False))
            yield from zip(optimizer.params_in_partition[i], held)
    else:
        yield from ((p, p.grad) for p in model.parameters() if p.grad is not None)
