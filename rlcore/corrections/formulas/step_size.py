"""Effective sample size over sequences, and the step size that VCPO makes of it."""

from __future__ import annotations

from math import inf
from typing import Literal

import torch
from torch import Tensor

from rlcore.corrections.formulas.arguments import choice, require, same_shape
from rlcore.corrections.formulas.numerics import log_difference, ratio, sums

Rule = Literal["sqrt", "linear"]


def sequence_ess_accumulate(
    logp_target: Tensor, logp_inf: Tensor, mask: Tensor, *, cap: float | None = None
) -> Tensor:
    """Statistics [3] float64 of some of a batch's sequences, which add up over micro-batches and
    ranks: `sum w`, `sum w^2` and the sequences, `w = prod_t p_target/p_inf`, at most `cap`.

    Sequences without a usable token are not counted. Log-probs and mask [B, T].
    """
    require(cap is None or cap >= 1.0, f"cap={cap} is not accepted: ratio 1 must pass it.")
    same_shape(logp_target=logp_target, logp_inf=logp_inf, mask=mask)
    difference, usable = log_difference(logp_target, logp_inf, mask)
    w = ratio(difference.double().clamp(-1e6, 1e6).sum(-1)).clamp(max=inf if cap is None else cap)
    present = usable.any(-1)
    w = torch.where(present, w, 0.0)
    return sums([w, w * w, present])


def sequence_ess(statistics: Tensor) -> float:
    """`(sum w)^2 / (n sum w^2)` in (0, 1] from summed `sequence_ess_accumulate`; 1 without a
    sequence. Waits for the device."""
    require(statistics.shape == (3,), f"statistics has shape {list(statistics.shape)}, not [3].")
    first, second, count = statistics.tolist()
    return first**2 / (count * second) if count else 1.0


def vcpo_scale(ess: float, *, rule: Rule = "sqrt", base: float = 1.0) -> float:
    """Factor of the learning rate, in (0, 1]: `min(1, ess/base)`, or its square root (VCPO,
    arXiv 2602.17616): the root for Adam, whose steps do not grow with the gradient."""
    choice("rule", rule, ("sqrt", "linear"))
    require(0.0 < base <= 1.0, f"base={base} is not accepted: it is a share of samples, in (0, 1].")
    share = min(1.0, ess / base)
    return share**0.5 if rule == "sqrt" else share
