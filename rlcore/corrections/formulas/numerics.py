"""Shared by every formula: which tokens count, safe log differences, and global sums.

A token counts when its mask is 1 and its log-probs can be compared: neither is NaN, and they are
not infinite in a way that makes the difference undefined. Masked positions may hold anything.
Everything is detached and at least float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlcore.objectives import precision
from rlcore.objectives.precision import CLAMP

# sums over data-parallel ranks; None at the call sites: a single rank
SumReduce = Callable[[Tensor], Tensor]


def at_least_float32(values: Tensor) -> Tensor:
    """Detached, half precisions widened to float32; float64 stays."""
    return precision.at_least_float32(values.detach())


def log_difference(numerator: Tensor, denominator: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`numerator - denominator` where it is defined, else 0, and where it is defined.

    Args: log-probs [B, T] of any float dtype; mask [B, T] bool or 0/1. Returns (difference [B, T]
    unclamped and possibly infinite, usable [B, T] bool). A masked or undefined token (a NaN, or the
    same infinity on both sides) has difference 0 and is not usable.
    """
    raw = at_least_float32(numerator) - at_least_float32(denominator)
    usable = (mask != 0) & ~torch.isnan(raw)
    return torch.where(usable, raw, torch.zeros_like(raw)), usable


def ratio(difference: Tensor) -> Tensor:
    """`exp` of a log difference clamped at +-20."""
    return difference.clamp(-CLAMP, CLAMP).exp()


def sums(values: Sequence[Tensor]) -> Tensor:
    """[n] float64: the sum of each tensor. Statistics add up: so do these of several batches."""
    return torch.stack([v.sum(dtype=torch.float64) for v in values])


def total(values: Sequence[Tensor], reduce: SumReduce | None) -> list[float]:
    """Global sums in float64 of several tensors, by one reduction. Waits for the device."""
    summed = sums(values)
    found: list[float] = (summed if reduce is None else reduce(summed)).tolist()
    return found


def share(which: Tensor, mask: Tensor, reduce: SumReduce | None) -> float:
    """Global share of the mask's tokens at which `which` [B, T] bool holds; 0 without any token."""
    hits, count = total([which & (mask != 0), mask != 0], reduce)
    return hits / max(count, 1.0)


def finish(weight: Tensor, usable: Tensor, mask: Tensor) -> Tensor:
    """Weights for the caller: 1 (no correction) at masked tokens, 0 at unmasked ones that could not
    be compared."""
    return torch.where(usable, weight, torch.where(mask != 0, 0.0, 1.0).to(weight))
