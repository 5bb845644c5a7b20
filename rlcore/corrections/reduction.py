"""The reduction of a single rank, for callers that have no others."""

from __future__ import annotations

import torch

from rlcore.interfaces import Reduce


class OneRank(Reduce):
    """No reduction."""

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        return values


ONE_RANK = OneRank()
