"""The reduction of a single rank, for callers that have no others."""

from __future__ import annotations

import torch


class OneRank:
    """Implements `rlcore.interfaces.Reduce` where there is nothing to reduce over."""

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        return values


ONE_RANK = OneRank()
