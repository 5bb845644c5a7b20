"""Masks of Off-Policy Sequence Masking: sequences that the learner has moved away from and that did
badly teach little and disturb much."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.corrections.formulas.arguments import require, same_shape
from rlcore.corrections.formulas.numerics import at_least_float32, finish, log_difference


def sequence_kl(logp_target: Tensor, logp_inf: Tensor, mask: Tensor) -> Tensor:
    """`mean_t (log p_inf - log p_target)` [B] float64 of each sequence's tokens: its k1 estimate of
    KL(p_inf || p_target). 0 for a sequence without tokens."""
    difference, usable = log_difference(logp_inf, logp_target, mask)
    # one impossible token decides, without making a mean of infinities
    summed = difference.double().clamp(-1e6, 1e6).sum(-1)
    return summed / usable.sum(-1).clamp(min=1)


def opsm(
    logp_target: Tensor, logp_inf: Tensor, advantages: Tensor, mask: Tensor, *, delta: float
) -> Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, eq. 9): weight [B, T], 0 or 1.

    0 where `A < 0` and `mean_t (log p_inf - log p_target) > delta` over the tokens of its sequence,
    else 1. Such a token stays in the loss's denominator. Biased by the mask: those sequences
    contribute nothing to what would lower their probability. Log-probs and advantages [B, T], mask
    [B, T].
    """
    require(delta >= 0.0, f"delta={delta} is not accepted: it bounds a divergence, so it is >= 0.")
    same_shape(logp_target=logp_target, logp_inf=logp_inf, advantages=advantages, mask=mask)
    difference, usable = log_difference(logp_inf, logp_target, mask)
    moved = sequence_kl(logp_target, logp_inf, mask) > delta
    bad = torch.where(usable, at_least_float32(advantages), 0.0) < 0
    weight = torch.ones_like(difference).masked_fill(bad & moved[:, None], 0.0)
    return finish(weight, usable, mask)
