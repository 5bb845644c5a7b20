"""Sequence-level formulas over groups of samples of one prompt: RAPID's advantage, and keeping the best."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.corrections.formulas.numerics import log_difference, ratio
from rlcore.errors import UserError


def sequence_log_ratio(logp_new: Tensor, logp_mu: Tensor, mask: Tensor) -> Tensor:
    """`sum_t (log p_new - log mu)` [B] float64 over the tokens that count; 0 for an empty sequence."""
    difference, _ = log_difference(logp_new, logp_mu, mask)
    return difference.double().clamp(-1e6, 1e6).sum(-1)


def rapid_advantages(
    logp_new: Tensor,
    logp_mu: Tensor,
    mask: Tensor,
    rewards: Tensor,
    group_ids: Tensor,
    *,
    eta: float = 2.0,
    leave_one_out: bool = False,
) -> tuple[Tensor, Tensor]:
    """RAPID's importance-weighted group advantage and sequence weight (RAPID eq. 3 to 5).

    `W = min(exp(sum_t log p_new - log mu), eta)`; `A_n = R_n - (1/|K|) sum_{n' in K} W_n' R_n'`. With `leave_one_out` n
    leaves its own sum and the divisor stays |K|: the gradient estimate `W_n A_n grad log p_new` is then unbiased where
    nothing is clipped. The paper prints `max{W, eta}` in eq. 5; its text describes a clip from above, built here.

    Args: log-probs [B,T], mask [B,T], rewards [B], group_ids [B]; groups are whole on the caller's rank.
    Returns (advantage [B] float32, weight [B] float32). A group of one on policy has advantage 0 (its reward with
    `leave_one_out`, having no baseline). The sequence weight of an empty sequence is 1.
    """
    weight = ratio(sequence_log_ratio(logp_new, logp_mu, mask)).clamp(max=eta)
    rewards = rewards.detach().double()
    unique, index = torch.unique(group_ids, return_inverse=True)
    sums = torch.zeros((2, len(unique)), dtype=torch.float64, device=rewards.device)
    weighted = weight * rewards
    baseline, size = sums.index_add(1, index, torch.stack([weighted, torch.ones_like(rewards)]))[:, index]
    if leave_one_out:
        baseline = baseline - weighted
    return (rewards - baseline / size).float(), weight.float()


def best_of_group(rewards: Tensor, group_ids: Tensor, *, keep: int) -> Tensor:
    """Which samples stay when only the `keep` of highest reward in each group do (DistillSparse 4.3).

    Args: rewards [B], group_ids [B]. Returns keep [B] bool. Ties go to the earlier sample; a NaN reward comes last; a
    group of `keep` or fewer stays whole. Raises UserError for keep < 1.
    """
    if keep < 1:
        raise UserError(f"algorithm.keep_best={keep} is not accepted: at least one sample of a group must stay.")
    values = torch.nan_to_num(rewards.detach().double(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    by_reward = values.argsort(descending=True, stable=True)
    order = by_reward[group_ids[by_reward].argsort(stable=True)]
    _, sizes = torch.unique_consecutive(group_ids[order], return_counts=True)
    position = torch.arange(len(values), device=values.device)
    rank = position - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return torch.zeros(len(values), dtype=torch.bool, device=values.device).scatter(0, order, rank < keep)
