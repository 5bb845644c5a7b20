"""Optimal budgeted rejection sampling, OBRS (Jackpot, section 3): how likely a sampled token stays,
the share that stays in each state, and how far the tokens that stay are from their target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rlcore.corrections.numerics import (
    SumReduce,
    at_least_float32,
    choice,
    first_occurrence,
    positive,
    probability,
    ratio,
    result_dtype,
    same_shape,
    sums,
)
from rlcore.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Missing = Literal["zero", "bound"]
Tail = Literal["none", "residual"]
# the settings' defaults, too
LAM = 1.0
MISSING: Missing = "zero"
TINY = 1e-6  # smallest normaliser: below it (almost) nothing was accepted
# mass that float32 log-probs over a whole vocabulary may miss by rounding: not a tail
COMPLETE = 1e-5


def ratio_or_zero(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Clamped ratio, 0 where it is undefined (NaN, or the same infinity twice)."""
    difference = at_least_float32(numerator) - at_least_float32(denominator)
    return torch.where(torch.isnan(difference), 0.0, ratio(difference))


def obrs_acceptance(logp_target: Tensor, logp_inf: Tensor, *, lam: float = LAM) -> Tensor:
    """Probability [B, T] of keeping each sampled token: `min(1, p_target / (lam p_inf))` (Jackpot
    eq. 3).

    Log-probs [B, T]. A token whose ratio is undefined (NaN) is never kept: 0.
    """
    positive("lam", lam)
    same_shape(logp_target=logp_target, logp_inf=logp_inf)
    return (ratio_or_zero(logp_target, logp_inf) / lam).clamp(max=1.0)


def obrs_normalizer(
    topk_ids_inf: Tensor,
    topk_logp_inf: Tensor,
    topk_ids_tgt: Tensor,
    topk_logp_tgt: Tensor,
    logp_tgt_at_inf_ids: Tensor,
    *,
    lam: float = LAM,
    missing: Missing = MISSING,
    tail: Tail = "none",  # the paper's; the setting's default is residual
) -> tuple[Tensor, Tensor]:
    """`Z = sum_x min(p_inf(x), p_t(x)/lam)` over `V_k = topk(p_inf) U topk(p_t)` (Jackpot sec.
    4.4.1).

    Args:
        topk_ids_inf, topk_logp_inf: [B, T, k], the actor's top k; id -1 (log-prob then ignored)
            where it had fewer.
        topk_ids_tgt, topk_logp_tgt: [B, T, k2], the target policy's own top k, padded the same way.
        logp_tgt_at_inf_ids: [B, T, k], the target's log-probs at `topk_ids_inf`.
        missing: p_inf is unknown on `topk(p_t) \\ topk(p_inf)`. `zero` takes 0, a lower bound of
            Z. `bound` gives each of these n tokens `min(smallest returned top-k probability,
            residual mass / n)`.
        tail: what lies outside V_k. `none` drops it, as the paper does. `residual` adds
            `min(1 - sum p_inf, (1 - sum p_t)/lam)`, an upper bound that is exact when the
            distributions match.

    Returns (z_approx [B, T] float32 in [0, min(1, 1/lam)], unknown_share [B, T] float32: share of
    V_k without p_inf). An id that occurs twice counts once. Matched distributions at lam=1 give
    exactly 1 with `residual`, and with `none` when V_k holds all of p_inf up to rounding. Sums are
    in float64; float64 log-probs give float64 results.
    """
    positive("lam", lam)
    choice("missing", missing, ("zero", "bound"))
    choice("tail", tail, ("none", "residual"))
    same_shape(
        topk_ids_inf=topk_ids_inf,
        topk_logp_inf=topk_logp_inf,
        logp_tgt_at_inf_ids=logp_tgt_at_inf_ids,
    )
    same_shape(topk_ids_tgt=topk_ids_tgt, topk_logp_tgt=topk_logp_tgt)
    k = topk_ids_inf.shape[-1]
    ids = torch.cat([topk_ids_inf.long(), topk_ids_tgt.long()], -1)
    first = first_occurrence(ids)
    p_inf = probability(topk_logp_inf, first[..., :k])
    p_tgt = probability(
        torch.cat([at_least_float32(logp_tgt_at_inf_ids), at_least_float32(topk_logp_tgt)], -1),
        first,
    )
    unknown = first[..., k:]
    p_unknown = _unknown_probability(p_inf, first[..., :k], unknown, missing)
    p_inf, p_tgt = torch.cat([p_inf, p_unknown], -1), p_tgt / lam
    z = torch.minimum(p_inf, p_tgt).sum(-1)
    # sum over V_k plus the residual, rearranged so that equal distributions cancel term by term,
    # to the bit:
    # sum min(p, q) + min(1 - sum p, 1/lam - sum q) = min(1 - sum (p - q)+, 1/lam - sum (q - p)+)
    whole = torch.minimum(
        1.0 - (p_inf - p_tgt).clamp(min=0).sum(-1), 1.0 / lam - (p_tgt - p_inf).clamp(min=0).sum(-1)
    )
    if tail == "residual":
        z = torch.maximum(z, whole)
    else:
        z = torch.where(p_inf.sum(-1) >= 1.0 - COMPLETE, torch.maximum(z, whole), z)
    share = unknown.sum(-1) / first.sum(-1).clamp(min=1)
    dtype = result_dtype(topk_logp_inf)
    return z.clamp(0.0, min(1.0, 1.0 / lam)).to(dtype), share.to(dtype)


def _unknown_probability(p_inf: Tensor, known: Tensor, unknown: Tensor, missing: Missing) -> Tensor:
    """p_inf [..., k2] taken for the tokens of the target's top k that the actor did not return."""
    if missing == "zero" or p_inf.shape[-1] == 0:
        return torch.zeros_like(unknown, dtype=torch.float64)
    smallest = torch.where(known, p_inf, 1.0).amin(-1, keepdim=True)
    residual = (1.0 - p_inf.sum(-1, keepdim=True)).clamp(min=0)
    each = torch.minimum(smallest, residual / unknown.sum(-1, keepdim=True).clamp(min=1))
    return torch.where(unknown, each, 0.0)


def obrs_calibrate(
    z_approx: Tensor,
    accepted: Tensor,
    mask: Tensor,
    *,
    lam: float = LAM,
    reduce: SumReduce | None = None,
) -> tuple[Tensor, float, float]:
    """`Z_t = clamp(kappa Z_approx, tiny, min(1, 1/lam))` with `kappa = alpha_hat / mean(Z_approx)`
    (Jackpot 4.4.2).

    Args: z_approx [B, T]; mask [B, T]; accepted [B, T], the draws (bool: the paper's Bernoulli
    estimate of alpha_hat) or their probabilities a(x). The latter give the same mean without the
    draws' noise. Means are over the global batch's tokens. Returns (z [B, T] float32, kappa,
    alpha_hat). If no z_approx is above 0 (no top k stored), every Z_t is alpha_hat; without any
    token kappa and alpha_hat are 1. Kappa and alpha_hat are numbers, so this waits for the device;
    `calibration_sums` and `calibrated` do not.
    """
    positive("lam", lam)
    same_shape(z_approx=z_approx, accepted=accepted, mask=mask)
    statistics = calibration_sums(z_approx, accepted, mask)
    if reduce is not None:
        statistics = reduce(statistics)
    z, kappa, alpha_hat = calibrated(z_approx, mask, statistics, lam=lam)
    kappa_value, alpha_value = torch.stack([kappa, alpha_hat]).tolist()
    return z, kappa_value, alpha_value


def calibration_sums(z_approx: Tensor, accepted: Tensor, mask: Tensor) -> Tensor:
    """[3] float64: accepted tokens, sum of z_approx, tokens. Adds up over micro-batches, ranks."""
    on = mask != 0
    kept = torch.where(on, accepted.to(at_least_float32(z_approx).dtype), 0.0)
    return sums([kept, torch.where(on, at_least_float32(z_approx), 0.0), on])


def calibrated(
    z_approx: Tensor, mask: Tensor, statistics: Tensor, *, lam: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(Z_t [B, T], kappa, alpha_hat), the latter 0-d, from the whole batch's `calibration_sums`."""
    kept, z_sum, count = statistics.unbind()
    alpha_hat = torch.where(count > 0, kept / count.clamp(min=1.0), 1.0)
    kappa = torch.where(z_sum > 0, kept / z_sum, 1.0)
    z_approx = at_least_float32(z_approx)
    scaled = z_approx * kappa.to(z_approx.dtype)
    z = torch.where((z_sum > 0) | (count == 0), scaled, alpha_hat.to(z_approx.dtype))
    bounded = torch.where(mask != 0, z, 1.0).clamp(TINY, min(1.0, 1.0 / lam))
    return bounded, kappa, alpha_hat


def obrs_divergence(
    topk_ids_inf: Tensor,
    topk_logp_inf: Tensor,
    logp_tgt_at_inf_ids: Tensor,
    *,
    lam: float = LAM,
) -> Tensor:
    """KL(p_t || p_kept) [B, T] float32 in nats, from the actor's stored top k: how far the accepted
    tokens are from the target.

    `sum_x p_t log(p_t/p_kept)` over the stored tokens and one bin for all others, with `p_kept =
    min(p_inf, p_t/lam)/Z` over the same bins. Never negative; exact when k is the vocabulary, and 0
    when the distributions match. Arguments as in `obrs_normalizer`.
    """
    positive("lam", lam)
    same_shape(
        topk_ids_inf=topk_ids_inf,
        topk_logp_inf=topk_logp_inf,
        logp_tgt_at_inf_ids=logp_tgt_at_inf_ids,
    )
    first = first_occurrence(topk_ids_inf.long())
    known = [probability(logp, first) for logp in (topk_logp_inf, logp_tgt_at_inf_ids)]
    p_inf, p_tgt = (torch.cat([p, (1.0 - p.sum(-1, keepdim=True)).clamp(min=0)], -1) for p in known)
    # p_t/p_kept = Z max(lam, p_t/p_inf)
    z = torch.minimum(p_inf, p_tgt / lam).sum(-1)
    rises = (p_tgt / p_inf.clamp(min=1e-6)).clamp(min=lam)
    divergence = z.clamp(min=1e-6).log() + (p_tgt * rises.log()).sum(-1)
    return divergence.clamp(min=0).to(result_dtype(topk_logp_inf))
