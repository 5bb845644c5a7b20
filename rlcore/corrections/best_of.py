"""Oversampling: more samples than needed are drawn of each prompt, and the best are trained on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlcore.corrections.base import BaseCorrection
from rlcore.corrections.functional import best_of_group


class BestOf(BaseCorrection):
    """Keeps the `keep` samples of highest reward in each group, ties to the earlier (DistillSparse 4.3).

    Advantages are taken over the kept ones. Set by `algorithm.keep_best`, not by name.
    """

    name = "keep_best"

    def select(self, rewards: Sequence[float], keep: int) -> list[int] | None:
        values = torch.tensor(list(rewards), dtype=torch.float64)
        chosen = best_of_group(values, torch.zeros(len(values), dtype=torch.long), keep=keep)
        return torch.nonzero(chosen)[:, 0].tolist()
