"""Adaptive importance sampling: how strongly to correct is itself estimated from the batch (AIS section 3)."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from rlcore.corrections.formulas.numerics import (
    CLAMP,
    SumReduce,
    at_least_float32,
    finish,
    log_difference,
    ratio,
    total,
)


def ais(
    logp_ref: Tensor,
    logp_inf: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cap: float = 5.0,
    delta: float = 0.02,
    gamma: float = 1.2,
    beta: float = 1.0,
    eps: float = 1e-6,
    reduce: SumReduce | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Weight `1 + alpha (min(p_ref/p_inf, cap) - 1)` with one alpha in [0, 1] for the global batch (AIS eq. 12 to 18).

    alpha = clip(alpha_ess - beta alpha_var, 0, 1) * alpha_mis, with
    alpha_ess = (1 + CV(w)^2)^(-1/2), alpha_mis = min(1, mean|dlogp| / delta),
    alpha_var = max(0, (dsigma - gamma)/gamma), dsigma = std(A w) / (std(A) + eps).
    CV and std are the sample ones (n - 1), 0 on fewer than two tokens; |dlogp| counts as at most 20, so that no single
    broken token decides alpha.

    Args: log-probs and advantages [B,T], mask [B,T]; `reduce` sums over data-parallel ranks.
    Returns (weight [B,T] in [1 - alpha, 1 + alpha (cap - 1)], {"alpha", "alpha_ess", "alpha_mis", "alpha_var"}).
    Matched log-probs give weight exactly 1. Without any token alpha is 0.
    """
    difference, usable = log_difference(logp_ref, logp_inf, mask)
    w = ratio(difference).clamp(max=cap)
    a = torch.where(usable, at_least_float32(advantages), 0.0).double()
    wide = w.double()
    samples = [wide, a, a * wide]
    n, mismatch, *sums = total(
        [usable, difference.abs().clamp(max=CLAMP), *(torch.where(usable, s, 0.0) for s in samples)], reduce
    )
    means = [s / max(n, 1.0) for s in sums]
    # centred before squaring: the one-pass form would lose a small variance to cancellation
    squares = total([torch.where(usable, (s - m) ** 2, 0.0) for s, m in zip(samples, means)], reduce)
    std_w, std_a, std_aw = (sqrt(s / (n - 1)) if n > 1 else 0.0 for s in squares)
    cv = std_w / means[0] if n > 1 else 0.0
    alpha_ess = (1.0 + cv**2) ** -0.5
    alpha_mis = min(1.0, mismatch / max(n, 1.0) / delta)
    alpha_var = max(0.0, (std_aw / (std_a + eps) - gamma) / gamma)
    alpha = min(max(alpha_ess - beta * alpha_var, 0.0), 1.0) * alpha_mis
    weight = finish(1.0 + alpha * (w - 1.0), usable, mask)
    return weight, {"alpha": alpha, "alpha_ess": alpha_ess, "alpha_mis": alpha_mis, "alpha_var": alpha_var}
