"""Which tokens a correction's statistics are over."""

from __future__ import annotations

from torch import Tensor

from rlcore.types import StepTensors


def inside(step: StepTensors, mask: Tensor) -> Tensor:
    """The tokens of `mask` [B, T] that have a ratio: under a safe set (DVP), those inside it."""
    return mask if step.inside is None else mask & step.inside
