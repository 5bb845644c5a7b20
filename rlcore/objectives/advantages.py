"""Advantages: one number per episode from outcome rewards, from its group or from the whole batch,
or one per turn or token from rewards of turns.

No torch at import.
"""

from __future__ import annotations

from math import comb
from typing import TYPE_CHECKING, ClassVar

from rlcore.interfaces import Reduce
from rlcore.lazy import torch
from rlcore.objectives.protocols import Advantage, Bias, Rewards

if TYPE_CHECKING:
    from torch import Tensor

    from rlcore.objectives.specs import ObjectiveSpec


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
    it, so the loss is the mean over what is left. Its reward still enters its group's mean and
    standard deviation, and the batch's. So the gradient comes from the responses that ended by
    themselves, and is biased towards them, by the share that was cut off.
    """
    return mask if truncated is None else mask & ~truncated[:, None]


def sequence_advantages(
    advantage: Advantage,
    rewards: Tensor,
    group_ids: Tensor,
    reduce: Reduce,
    tokens: Tensor | None = None,
) -> Tensor:
    """Advantage [B] float32 of each episode. tokens [B]: its sampled tokens (`Rewards.tokens`)."""
    return advantage(Rewards(rewards, group_ids, reduce, tokens)).float()


def over_tokens(advantage: Tensor, mask: Tensor) -> Tensor:
    """[B] repeated over the tokens of a [B, T] mask, 0 outside it; float32."""
    return advantage.float()[:, None] * (mask != 0)


def rewards_to_go(rewards: Tensor, discount: float) -> Tensor:
    """[B, K] float64: `G_t = sum over s >= t of discount^(s - t) r_s` of rewards [B, K] by turn."""
    out = rewards.detach().double().clone()
    for turn in range(out.shape[1] - 2, -1, -1):
        out[:, turn] += discount * out[:, turn + 1]
    return out


def turn_advantages(
    advantage: Advantage,
    to_go: Tensor,
    group_ids: Tensor,
    tokens: Tensor,
    reduce: Reduce,
    present: Tensor,
) -> Tensor:
    """Advantage [B, K] float32 of each turn from its reward to go, [B, K]; 0 where not `present`
    [B, K] bool. tokens [B, K]: sampled tokens of each turn.

    A turn is compared with the group's turns of the same number, of the samples that have one;
    statistics of the batch are over all its turns. Biased by what is compared: a turn that no other
    sample of the group reaches has nothing to be compared with and advantage 0, as a group of one
    has. So under `rloo` the gradient of turn t is scaled by the probability that another sample
    reaches it. Under `group_mean` it is scaled by the mean of (m - 1)/m with m the samples that do.
    Turn by turn, both point in the direction of the gradient of the expected reward.
    """
    turns = torch.arange(to_go.shape[1], device=to_go.device)
    ids = group_ids[:, None] * to_go.shape[1] + turns
    out = torch.zeros(to_go.shape, device=to_go.device)
    out[present] = sequence_advantages(
        advantage, to_go[present], ids[present], reduce, tokens[present]
    )
    return out


LEAST_VARIANCE = 1e-8  # OpenRLHF's bound of the variance over tokens
EPS = 1e-6  # keeps a division by a vanishing standard deviation finite


OWN_REWARD = Bias("own reward", {"advantage": "rloo"})


class GroupMean(Advantage):
    """`r - mean(group)`: Dr. GRPO's advantage, also AIS's and RAPID's on-policy limit.

    Biased in size by the episode's own reward in the mean: by (n - 1)/n in a group of n.
    """

    compares_group = True
    biases = (OWN_REWARD,)

    def __call__(self, rewards: Rewards) -> Tensor:
        return rewards.group_centred


class Grpo(Advantage):
    """`(r - mean) / (std + 1e-6)` over the group (DeepSeekMath), std is the sample standard
    deviation.

    Biased by the episode's own reward in the mean and, also in direction, by the deviation. A group
    whose rewards differ little counts as much as one whose rewards differ much.
    """

    compares_group = True
    biases = (OWN_REWARD, Bias("deviation", {"advantage": "rloo"}))

    def __call__(self, rewards: Rewards) -> Tensor:
        return rewards.group_centred / (rewards.group_std + EPS)


class Rloo(Advantage):
    """`r - mean of the others in the group` (Ahmadian et al. 2024); 0 in a group of one."""

    compares_group = True

    def __call__(self, rewards: Rewards) -> Tensor:
        size = rewards.group_size
        return rewards.group_centred * size / (size - 1).clamp(min=1)


class ReinforceAdvantage(Advantage):
    """`r - mean(global batch)`: group-free REINFORCE with a mean baseline."""

    def __call__(self, rewards: Rewards) -> Tensor:
        return rewards.batch_centred


class ReinforcePp(Advantage):
    """REINFORCE++: rewards whitened over the global batch (Hu et al. 2025, arXiv 2501.03262).

    `whitening=episodes`: `(r - mean) / (std + 1e-6)`, std the sample standard deviation over
    episodes. `tokens` (OpenRLHF's): `(r - mean) / sqrt(max(var, 1e-8))`. Mean and variance are over
    the batch's sampled tokens, each with its episode's reward, less the sum of a KL in the reward
    from that token on. So a long response counts as often as it has tokens. Tokens that are later
    rejected or filtered count. Biased in size alone, by the deviation, which scales a whole step;
    the mean contains the episode's own reward, a share of 1/episodes (or its share of the tokens).
    """

    own_settings = ("whitening",)
    biases: ClassVar[tuple[Bias, ...]] = (Bias("deviation", {"advantage": "reinforce"}),)

    def __init__(self, spec: ObjectiveSpec) -> None:
        self._by_tokens = spec.whitening == "tokens"

    def __call__(self, rewards: Rewards) -> Tensor:
        values = self.centred(rewards)
        weight = rewards.tokens if self._by_tokens else values.new_ones(len(values))
        return self._whitened(rewards, values, weight)

    def of_tokens(self, rewards: Rewards, penalty: Tensor, mask: Tensor) -> Tensor:
        """Over tokens, as published: whitens the reward less the sum of the penalty from each token
        on."""
        if not self._by_tokens:
            return super().of_tokens(rewards, penalty, mask)
        values = (self.centred(rewards)[:, None] - penalty)[mask]
        out = torch.zeros_like(penalty)
        out[mask] = self._whitened(rewards, values, torch.ones_like(values))
        return out

    def _whitened(self, rewards: Rewards, values: Tensor, weight: Tensor) -> Tensor:
        """[n] values of the rank's episodes or tokens over the global batch, each counted `weight`
        [n] times."""
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

    Over tokens the batch's mean of these differences is not 0: lengths differ within a group.
    Biased in size by its own reward in the group's mean and by the deviation of the batch.
    """

    compares_group = True
    biases = (OWN_REWARD, Bias("deviation", {"advantage": "rloo"}))

    def centred(self, rewards: Rewards) -> Tensor:
        return rewards.group_centred


class Opo(Advantage):
    """`r - b`, b the mean of the group's rewards weighted by tokens (OPO, Hao et al. 2025, arXiv
    2505.23585): the baseline of least variance if the gradients of all tokens have equal norm.
    Biased by the episode's own reward in the mean, by its tokens' share of the group's tokens.
    """

    compares_group = True
    biases = (OWN_REWARD,)

    def __call__(self, rewards: Rewards) -> Tensor:
        centred, tokens = rewards.group_centred, rewards.tokens
        longest = rewards.group_sum(tokens).clamp(min=1.0)
        return centred - rewards.group_sum(tokens * centred) / longest


class Gpg(Advantage):
    """`B/(B - M) (r - mean)` over the group, M of the batch's B episodes in groups of equal rewards
    (GPG, Chu et al. 2025, arXiv 2504.02546, F_norm = 1).

    Such groups have no gradient, and the factor makes up for their share of the denominator. verl's
    code counts rewards of 0 instead of M; this is the paper's text. Biased in size alone: by the
    episode's own reward in the mean, and by the factor.
    """

    compares_group = True
    biases = (OWN_REWARD, Bias("factor", {"advantage": "rloo"}))

    def __call__(self, rewards: Rewards) -> Tensor:
        centred = rewards.group_centred
        differs = rewards.group_sum(centred.abs()) > 0
        informative = rewards.batch_sum(differs)
        scale = rewards.batch_sum(torch.ones_like(centred)) / max(informative, 1.0)
        return centred * scale


class PassK(Advantage):
    """Gradient of the expected best reward of k attempts, which for rewards of 0 and 1 is pass@k.
    PKPO, Walder and Karkhanis 2025, arXiv 2505.15201, with its baseline over k - 1.

    `A_i = k mean_S [max over S of r - max over S less i of r]`: what i adds to the best of k. S are
    the sets of k of the group's n samples that hold i. Unbiased for that objective for every k <=
    n: the baseline does not depend on i. For the expected reward it is biased towards the best of
    k. With k = n only the best sample has an advantage, its lead over the second (arXiv
    2503.19595). A smaller group, after failed scores, counts with its own size as k.
    """

    compares_group = True
    own_settings = ("pass_k",)
    biases = (Bias("best of k", {"advantage": "rloo"}),)

    def __init__(self, spec: ObjectiveSpec) -> None:
        self._k = spec.pass_k

    def __call__(self, rewards: Rewards) -> Tensor:
        out = torch.zeros_like(rewards.values)
        for group in rewards.group_ids.unique():
            rows = rewards.group_ids == group
            out[rows] = self._of_group(rewards.values[rows])
        return out

    def _of_group(self, rewards: Tensor) -> Tensor:
        n = len(rewards)
        k = min(self._k, n)
        if k < 2:
            return torch.zeros_like(rewards)
        ordered, order = rewards.sort()
        # sets whose second best is the m-th smallest: m choose k - 2
        sets = torch.tensor([comb(m, k - 2) / comb(n, k) for m in range(n)], dtype=torch.float64)
        lead = (ordered[:, None] - ordered).tril()
        return torch.zeros_like(rewards).scatter(0, order, n * (lead * sets.to(lead)).sum(1))


class Gae(Advantage):
    """Advantages of tokens or turns from a critic's values, GAE(lambda) and off policy V-trace
    (`objectives/values.py`). Biased by the critic's errors as far as lambda is below 1 and the caps
    of its traces bind, and by `critic.whiten`, which subtracts the batch's mean."""

    needs_values = True
    biases = (Bias("critic"),)

    def __call__(self, rewards: Rewards) -> Tensor:
        raise RuntimeError("advantages of a critic's values are not of episodes")
