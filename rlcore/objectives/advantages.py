"""Advantages from outcome rewards: one number per sequence, from its group or from the whole batch.

Rewards [B] float32 and group_ids [B] int64 of one rank; groups are whole on a rank, so group statistics need no
reduction, batch statistics do. Statistics are taken in float64. A group of one, a group of equal rewards or a batch of
equal rewards gives exactly 0, never NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from rlcore.errors import UserError
from rlcore.interfaces import Reduce

Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce", "group_mean"]
EPS = 1e-6  # keeps a division by a vanishing standard deviation finite


class _Groups:
    """Sums of each sequence's group, repeated for its members."""

    def __init__(self, rewards: Tensor, group_ids: Tensor) -> None:
        self.rewards = rewards.detach().double()
        unique, self.index = torch.unique(group_ids, return_inverse=True)
        self.groups = len(unique)
        self.size = self.sum(torch.ones_like(self.rewards))
        high = torch.full((self.groups,), -torch.inf, dtype=torch.float64, device=rewards.device)
        low = -high
        high = high.scatter_reduce(0, self.index, self.rewards, "amax")
        low = low.scatter_reduce(0, self.index, self.rewards, "amin")
        # compared, not subtracted: the rounded mean of equal rewards need not be that reward
        self.flat = (high == low)[self.index]

    def sum(self, values: Tensor) -> Tensor:
        sums = torch.zeros(self.groups, dtype=torch.float64, device=values.device)
        return sums.index_add(0, self.index, values)[self.index]

    def centred(self) -> Tensor:
        return torch.where(self.flat, 0.0, self.rewards - self.sum(self.rewards) / self.size)


def group_mean(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """`r - mean(group)` [B] float32: Dr. GRPO's advantage, also AIS's and RAPID's on-policy limit."""
    return _Groups(rewards, group_ids).centred().float()


def grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """`(r - mean) / (std + 1e-6)` over the group [B] float32 (DeepSeekMath), std the sample one."""
    groups = _Groups(rewards, group_ids)
    centred = groups.centred()
    std = (groups.sum(centred**2) / (groups.size - 1).clamp(min=1)).sqrt()
    return (centred / (std + EPS)).float()


def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """`r - mean of the others in the group` [B] float32 (Ahmadian et al. 2024); 0 in a group of one."""
    groups = _Groups(rewards, group_ids)
    return (groups.centred() * groups.size / (groups.size - 1).clamp(min=1)).float()


def _batch_centred(rewards: Tensor, reduce: Reduce) -> tuple[Tensor, float]:
    """Rewards less their global mean, and the number of sequences of the global batch."""
    values = rewards.detach().double()
    count, summed = reduce(torch.stack([values.new_tensor(float(len(values))), values.sum()])).tolist()
    lowest = values.min().neg() if len(values) else values.new_tensor(-torch.inf)
    highest = values.max() if len(values) else values.new_tensor(-torch.inf)
    extremes = reduce.max(torch.stack([highest, lowest])).tolist()
    if extremes[0] == -extremes[1]:
        return torch.zeros_like(values), count
    return values - summed / max(count, 1.0), count


def reinforce(rewards: Tensor, group_ids: Tensor, *, reduce: Reduce) -> Tensor:
    """`r - mean(global batch)` [B] float32: group-free REINFORCE with a mean baseline."""
    return _batch_centred(rewards, reduce)[0].float()


def reinforce_pp(rewards: Tensor, group_ids: Tensor, *, reduce: Reduce) -> Tensor:
    """`(r - mean) / (std + 1e-6)` over the global batch's sequences [B] float32 (REINFORCE++)."""
    centred, count = _batch_centred(rewards, reduce)
    squares = reduce((centred**2).sum()[None]).item()
    return (centred / ((squares / max(count - 1.0, 1.0)) ** 0.5 + EPS)).float()


_BY_GROUP: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": group_mean,
    "rloo": rloo,
    "group_mean": group_mean,
}
_BY_BATCH: dict[str, Callable[..., Tensor]] = {"reinforce_pp": reinforce_pp, "reinforce": reinforce}


def sequence_advantages(kind: Advantage, rewards: Tensor, group_ids: Tensor, reduce: Reduce) -> Tensor:
    """Advantage [B] float32 of each sequence, by name."""
    if kind in _BY_GROUP:
        return _BY_GROUP[kind](rewards, group_ids)
    if kind in _BY_BATCH:
        return _BY_BATCH[kind](rewards, group_ids, reduce=reduce)
    raise UserError.choice("algorithm.advantage", kind, (*_BY_GROUP, *_BY_BATCH))


def over_tokens(advantage: Tensor, mask: Tensor) -> Tensor:
    """[B] repeated over the tokens of a [B,T] mask, 0 outside it; float32."""
    return advantage.float()[:, None] * (mask != 0)
