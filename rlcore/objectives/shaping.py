"""Shaping of rewards before advantages are taken."""

from __future__ import annotations

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, *, max_len: int, buffer: int, penalty: float) -> Tensor:
    """DAPO's soft overlong penalty [B] float32, to be added to the rewards (Yu et al. 2025, eq.
    13).

    lengths [B]: response tokens; max_len: the longest response allowed. Over its last `buffer`
    tokens the penalty rises from 0 to `penalty`, and stays there beyond. buffer=0: off.
    """
    if buffer == 0:
        return torch.zeros(len(lengths), device=lengths.device)
    over = lengths.float() - (max_len - buffer)
    return -penalty * (over / buffer).clamp(0.0, 1.0)
