"""Importance ratios p_target/p_inf, truncated (TIS), masked (MIS, IcePop) or used as a veto.

All functions take log-probs [B, T] (half precisions are widened) and a mask [B, T] (bool or 0/1),
and return detached tensors. A masked token never enters a product or mean and gets weight 1; an
unmasked token whose log-prob is NaN leaves the loss (weight 0) and its sequence's product too. Log
differences are clamped at +-20 before `exp`: per token, or once on the sum or mean at the sequence
levels.
"""

from __future__ import annotations

from math import log
from typing import Literal

import torch
from torch import Tensor

from rlcore.corrections.formulas.arguments import at_least_one, choice, require, same_shape
from rlcore.corrections.formulas.numerics import finish, log_difference, ratio
from rlcore.corrections.specs import MisSpec, TisSpec, VetoSpec

TokenOrSequence = Literal["token", "sequence"]
Level = Literal["token", "sequence", "geometric"]
_TIS, _MIS, _VETO = TisSpec(), MisSpec(), VetoSpec()


def importance_ratio(
    logp_target: Tensor, logp_inf: Tensor, mask: Tensor, level: Level
) -> tuple[Tensor, Tensor]:
    """The ratio [B, T] of each token or, repeated along the row, of its sequence; and the tokens
    [B, T] it is defined on.

    `sequence` multiplies the ratios of the row's tokens (a sum of logs), `geometric` takes their
    geometric mean.
    """
    choice("level", level, ("token", "sequence", "geometric"))
    same_shape(logp_target=logp_target, logp_inf=logp_inf, mask=mask)
    difference, usable = log_difference(logp_target, logp_inf, mask)
    if level != "token":
        # +inf and -inf in one row have no product; bounded to where the clamp binds anyway, they
        # cancel
        rows = difference.double().clamp(-1e6, 1e6).sum(-1, keepdim=True)
        if level == "geometric":
            rows = rows / usable.sum(-1, keepdim=True).clamp(min=1)
        difference = rows.to(difference.dtype).expand_as(difference)
    return ratio(difference), usable


def tis(
    logp_target: Tensor,
    logp_inf: Tensor,
    mask: Tensor,
    *,
    cap: float = _TIS.cap,
    level: TokenOrSequence = _TIS.level,
) -> Tensor:
    """Truncated importance sampling: `min(p_target/p_inf, cap)` (Jackpot eq. 6, AIS eq. 8).

    `level="sequence"` gives every token of a sequence `min(prod_t p_target/p_inf, cap)`. Biased by
    the truncation alone: a term of ratio r > cap counts cap/r of itself. Returns weight [B, T].
    """
    choice("level", level, ("token", "sequence"))
    at_least_one("cap", cap)
    weight, usable = importance_ratio(logp_target, logp_inf, mask, level)
    return finish(weight.clamp(max=cap), usable, mask)


def mis(
    logp_target: Tensor,
    logp_inf: Tensor,
    mask: Tensor,
    *,
    low: float,
    high: float,
    level: Level = _MIS.level,
) -> Tensor:
    """Masked importance sampling: the ratio where it lies in `[low, high]`, both ends included,
    else 0 (DVP sec. 6).

    At the sequence levels the product or the geometric mean is compared, and is the weight of every
    token of the sequence. IcePop (DistillSparse 2.1) is this at token level with 0.5 and 5. A zero
    weight stays in the loss's denominator: the estimator is the importance-weighted mean with large
    and small terms set to 0, which is its bias. Returns weight [B, T].
    """
    require(0.0 <= low <= high, f"low={low}, high={high} is not accepted: 0 <= low <= high.")
    weight, usable = importance_ratio(logp_target, logp_inf, mask, level)
    inside = (weight >= low) & (weight <= high)
    return finish(torch.where(inside, weight, torch.zeros_like(weight)), usable, mask)


def veto(
    logp_target: Tensor, logp_inf: Tensor, mask: Tensor, *, threshold: float = _VETO.threshold
) -> Tensor:
    """Which sequences stay: those with no token of `p_target/p_inf < threshold` (DVP app. A).
    Returns keep [B] bool.

    Only unmasked tokens with comparable log-probs can veto; an empty sequence stays.
    """
    require(0.0 < threshold <= 1.0, f"threshold={threshold} is not accepted: it is in (0, 1].")
    same_shape(logp_target=logp_target, logp_inf=logp_inf, mask=mask)
    # compared in logs, unclamped: a ratio clamped at e^-20 would never be below a smaller threshold
    difference, usable = log_difference(logp_target, logp_inf, mask)
    return ~((difference < log(threshold)) & usable).any(-1)
