"""Importance ratios p_target/p_inf, truncated (TIS), masked (MIS, IcePop) or used as a veto.

All functions take log-probs [B,T] (half precisions are widened) and a mask [B,T] (bool or 0/1), and return detached
tensors. A masked token never enters a product or mean and gets weight 1; an unmasked token whose log-prob is NaN leaves
the loss (weight 0) and its sequence's product too. Log differences are clamped at +-20 before `exp`: per token, or once
on the sum or mean at the sequence levels.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlcore.corrections.formulas.numerics import finish, log_difference, ratio
from rlcore.errors import UserError

TokenOrSequence = Literal["token", "sequence"]
Level = Literal["token", "sequence", "geometric"]


def importance_ratio(logp_target: Tensor, logp_inf: Tensor, mask: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """The ratio [B,T] of each token or, repeated along the row, of its sequence; and the tokens [B,T] it is defined on.

    `sequence` multiplies the ratios of the row's tokens (a sum of logs), `geometric` takes their geometric mean.
    """
    if level not in ("token", "sequence", "geometric"):
        raise UserError.choice("level", level, ("token", "sequence", "geometric"))
    difference, usable = log_difference(logp_target, logp_inf, mask)
    if level != "token":
        # +inf and -inf in one row have no product; bounded to where the clamp binds anyway, they cancel
        rows = difference.double().clamp(-1e6, 1e6).sum(-1, keepdim=True)
        if level == "geometric":
            rows = rows / usable.sum(-1, keepdim=True).clamp(min=1)
        difference = rows.to(difference.dtype).expand_as(difference)
    return ratio(difference), usable


def tis(
    logp_target: Tensor, logp_inf: Tensor, mask: Tensor, *, cap: float = 2.0, level: TokenOrSequence = "token"
) -> Tensor:
    """Truncated importance sampling: `min(p_target/p_inf, cap)` (Jackpot eq. 6, AIS eq. 8).

    `level="sequence"` gives every token of a sequence `min(prod_t p_target/p_inf, cap)`. Returns weight [B,T].
    """
    if level not in ("token", "sequence"):
        raise UserError.choice("level", level, ("token", "sequence"))
    weight, usable = importance_ratio(logp_target, logp_inf, mask, level)
    return finish(weight.clamp(max=cap), usable, mask)


def mis(
    logp_target: Tensor, logp_inf: Tensor, mask: Tensor, *, low: float, high: float, level: Level = "token"
) -> Tensor:
    """Masked importance sampling: the ratio where it lies in `[low, high]`, both ends included, else 0 (DVP sec. 6).

    At the sequence levels the product or the geometric mean is compared, and is the weight of every token of the
    sequence. IcePop (DistillSparse 2.1) is this at token level with 0.5 and 5. A zero weight stays in the loss's
    denominator: the estimator is the importance-weighted mean with large terms set to 0. Returns weight [B,T].
    """
    weight, usable = importance_ratio(logp_target, logp_inf, mask, level)
    inside = (weight >= low) & (weight <= high)
    return finish(torch.where(inside, weight, torch.zeros_like(weight)), usable, mask)


def veto(logp_target: Tensor, logp_inf: Tensor, mask: Tensor, *, threshold: float = 1e-4) -> Tensor:
    """Which sequences stay: those with no token of `p_target/p_inf < threshold` (DVP app. A). Returns keep [B] bool.

    Only unmasked tokens with comparable log-probs can veto; an empty sequence stays.
    """
    weight, usable = importance_ratio(logp_target, logp_inf, mask, "token")
    return ~((weight < threshold) & usable).any(-1)
