"""Figures of a mismatch that say whether correcting it pays.

N*, the answers a batch needs before correction lowers the mean squared error of its gradient, and
T*m, the tokens of an answer that come from the actor's probability floor (METHODS.md).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rlcore.corrections.numerics import at_least_float32, ratio, require, same_shape
from rlcore.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def batch_worth_correcting(plain: Tensor, corrected: Tensor, answers: int = 1) -> float:
    """N*: the number of answers above which the corrected gradient has the smaller mean squared
    error.

    plain, corrected [K, D]: the uncorrected and the corrected gradient of K parts of a batch, with
    respect to any D parameters or projections of them, each the mean over `answers` answers; K = 2
    are two halves. The corrected one counts as unbiased. With means over all parts

        bias^2 = mean over pairs i != j of (plain_i - corrected_i) (plain_j - corrected_j)
        N* = (var(corrected) - var(plain)) / bias^2,   variances of one answer

    inf if no bias is seen, 0 if the corrected gradient varies less, too. Waits for the device.
    """
    same_shape(plain=plain, corrected=corrected)
    parts = len(plain)
    require(parts >= 2, f"plain has {parts} rows: two parts of a batch are needed.")
    wide = [at_least_float32(g).double() for g in (plain, corrected)]
    difference = wide[0] - wide[1]
    pairs = difference.sum(0).square().sum() - difference.square().sum()
    spread = [(g - g.mean(0)).square().sum() * answers / (parts - 1) for g in wide]
    bias2, extra = (pairs / (parts * (parts - 1))).item(), (spread[1] - spread[0]).item()
    if bias2 <= 0:
        return math.inf
    return max(extra / bias2, 0.0)


def floor_tokens(logp_ref: Tensor, logp_inf: Tensor, outside: Tensor, mask: Tensor) -> Tensor:
    """The tokens [B] of each answer that the actor's probability floor has drawn, in expectation;
    T*m is the mean over answers.

    Log-probs and mask [B, T]; outside [B, T] bool: the sampled token lies outside the learner's
    safe set (`p_ref < rho max p_ref`; DVP). Such a token counts `1 - min(1, p_ref/p_inf)`, whose
    expectation is the probability that the actor puts on these tokens beyond the learner's own.
    """
    same_shape(logp_ref=logp_ref, logp_inf=logp_inf, outside=outside, mask=mask)
    excess = 1.0 - ratio(at_least_float32(logp_ref) - at_least_float32(logp_inf)).clamp(max=1.0)
    # under DVP the learner gives a token outside no probability: its log-prob is then undefined
    excess = torch.where(torch.isnan(excess), 1.0, excess)
    return torch.where((mask != 0) & outside, excess, 0.0).sum(-1)
