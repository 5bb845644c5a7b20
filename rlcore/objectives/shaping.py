"""What is done about responses that come near the length limit, or reach it (DAPO, Yu et al. 2025,
arXiv 2503.14476, section 3.4)."""

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


def without_truncated(mask: Tensor, truncated: Tensor | None) -> Tensor:
    """DAPO's overlong filtering: `mask` [B, T] bool less the sequences that were cut off.

    truncated [B] bool, None for none. A sequence that leaves the mask leaves every denominator with
    it, so the loss is the mean over what is left; its reward still enters its group's mean and
    standard deviation, and the batch's. So the gradient is that of the responses that ended by
    themselves: biased towards them, by the share that was cut off.
    """
    return mask if truncated is None else mask & ~truncated[:, None]
