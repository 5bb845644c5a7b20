"""Advantages from outcome rewards: one number per episode, from its group or from the whole batch.

No torch at import; the statistics are in `rewards.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcore.objectives.protocols import Advantage

if TYPE_CHECKING:
    from torch import Tensor

    from rlcore.objectives.rewards import Rewards

EPS = 1e-6  # keeps a division by a vanishing standard deviation finite


class GroupMean(Advantage):
    """`r - mean(group)`: Dr. GRPO's advantage, also AIS's and RAPID's on-policy limit."""

    compares_group = True

    def __call__(self, rewards: Rewards) -> Tensor:
        return rewards.group_centred


class Grpo(Advantage):
    """`(r - mean) / (std + 1e-6)` over the group (DeepSeekMath), std is the sample standard
    deviation."""

    compares_group = True

    def __call__(self, rewards: Rewards) -> Tensor:
        return rewards.group_centred / (rewards.group_std + EPS)


class Rloo(Advantage):
    """`r - mean of the others in the group` (Ahmadian et al. 2024); 0 in a group of one."""

    compares_group = True

    def __call__(self, rewards: Rewards) -> Tensor:
        size = rewards.group_size
        return rewards.group_centred * size / (size - 1).clamp(min=1)


class Reinforce(Advantage):
    """`r - mean(global batch)`: group-free REINFORCE with a mean baseline."""

    def __call__(self, rewards: Rewards) -> Tensor:
        return rewards.batch_centred


class ReinforcePp(Advantage):
    """`(r - mean) / (std + 1e-6)` over the global batch's episodes (REINFORCE++)."""

    def __call__(self, rewards: Rewards) -> Tensor:
        return rewards.batch_centred / (rewards.batch_std + EPS)
