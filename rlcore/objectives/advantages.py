"""Advantages from outcome rewards: one number per episode, from its group or from the whole batch.

No torch at import; the statistics are in `rewards.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcore.objectives.protocols import Advantage

if TYPE_CHECKING:
    from torch import Tensor

    from rlcore.objectives.rewards import Rewards
    from rlcore.objectives.specs import ObjectiveSpec

LEAST_VARIANCE = 1e-8  # OpenRLHF's bound of the variance over tokens
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
    """REINFORCE++: rewards whitened over the global batch (Hu et al. 2025, arXiv 2501.03262).

    `whitening=episodes`: `(r - mean) / (std + 1e-6)`, std the sample standard deviation over
    episodes. `tokens`: `(r - mean) / sqrt(max(var, 1e-8))`, mean and variance over the batch's
    sampled tokens, each with its episode's reward: a long response counts as often as it has tokens
    (OpenRLHF's). Tokens that are later rejected or filtered count. Not biased as to direction by
    itself: the deviation scales a whole step; the mean contains the episode's own reward, a share
    of 1/episodes (or its share of the tokens).
    """

    own_settings = ("whitening",)

    def __init__(self, spec: ObjectiveSpec) -> None:
        self._by_tokens = spec.whitening == "tokens"

    def __call__(self, rewards: Rewards) -> Tensor:
        values = self.centred(rewards)
        weight = rewards.tokens if self._by_tokens else values.new_ones(len(values))
        centred, count = rewards.centred_in_batch(values, weight)
        squares = rewards.batch_squares(centred, weight)
        if self._by_tokens:
            return centred / max(squares / max(count, 1.0), LEAST_VARIANCE) ** 0.5
        return centred / ((squares / max(count - 1.0, 1.0)) ** 0.5 + EPS)

    def centred(self, rewards: Rewards) -> Tensor:
        """[B]: what is whitened."""
        return rewards.values


class ReinforcePpBaseline(ReinforcePp):
    """REINFORCE++ with its group baseline: `r - mean(group)`, whitened over the global batch as
    REINFORCE++ whitens rewards (Hu et al. 2025, arXiv 2501.03262).

    Over tokens the batch's mean of these is not 0: lengths differ within a group.
    """

    compares_group = True

    def centred(self, rewards: Rewards) -> Tensor:
        return rewards.group_centred
