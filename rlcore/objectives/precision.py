"""The precision that formulas work in."""

from __future__ import annotations

import torch
from torch import Tensor

CLAMP = 20.0  # of log differences before exp: larger differences carry no further information


def at_least_float32(values: Tensor) -> Tensor:
    """Half precisions widened to float32; float64 stays, so that tests can be exact."""
    return values if values.dtype == torch.float64 else values.float()
