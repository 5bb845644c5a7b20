"""Optimal budgeted rejection sampling (OBRS) and its weights: Jackpot's formulas (sections 3 and 4,
appendix A).

A token drawn from p_inf is kept with probability `a(x) = min(1, p_t(x) / (lam p_inf(x)))`. Kept
tokens follow `min(p_inf, p_t/lam) / Z` with `Z = sum_x min(p_inf(x), p_t(x)/lam)`, and `Z max(lam,
p_t/p_inf)` weighs them to p_t. `E_{x~p_inf}[a(x)] = Z`, which is what repairs a Z summed over the
most likely tokens only.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlcore.corrections.formulas.arguments import at_least_one, choice, positive, same_shape
from rlcore.corrections.formulas.numerics import SumReduce, at_least_float32, ratio, sums
from rlcore.corrections.specs import JackpotSpec

Missing = Literal["zero", "bound"]
Tail = Literal["none", "residual"]
Target = Literal["ref", "new"]
_JACKPOT = JackpotSpec()
TINY = 1e-6  # smallest normaliser: below it (almost) nothing was accepted
# mass that float32 log-probs over a whole vocabulary may miss by rounding: not a tail
COMPLETE = 1e-5


def _ratio_or_zero(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Clamped ratio, 0 where it is undefined (NaN, or the same infinity twice)."""
    difference = at_least_float32(numerator) - at_least_float32(denominator)
    return torch.where(torch.isnan(difference), 0.0, ratio(difference))


def obrs_acceptance(logp_target: Tensor, logp_inf: Tensor, *, lam: float = _JACKPOT.lam) -> Tensor:
    """Probability [B, T] of keeping each sampled token: `min(1, p_target / (lam p_inf))` (Jackpot
    eq. 3).

    Log-probs [B, T]. A token whose ratio is undefined (NaN) is never kept: 0.
    """
    positive("lam", lam)
    same_shape(logp_target=logp_target, logp_inf=logp_inf)
    return (_ratio_or_zero(logp_target, logp_inf) / lam).clamp(max=1.0)


def obrs_normalizer(
    topk_ids_inf: Tensor,
    topk_logp_inf: Tensor,
    topk_ids_tgt: Tensor,
    topk_logp_tgt: Tensor,
    logp_tgt_at_inf_ids: Tensor,
    *,
    lam: float = _JACKPOT.lam,
    missing: Missing = _JACKPOT.missing,
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
    in float64, which float64 log-probs get back.
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
    first = _first_occurrence(ids)
    p_inf = _probability(topk_logp_inf, first[..., :k])
    p_tgt = _probability(
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
    dtype = _result_dtype(topk_logp_inf)
    return z.clamp(0.0, min(1.0, 1.0 / lam)).to(dtype), share.to(dtype)


def _result_dtype(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def _first_occurrence(ids: Tensor) -> Tensor:
    """Which entries [..., n] hold an id (>= 0) not seen earlier in the row. Sorts: n^2 comparisons
    would not scale."""
    ordered, order = ids.sort(dim=-1, stable=True)
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    return ~torch.zeros_like(repeated).scatter(-1, order, repeated) & (ids >= 0)


def _probability(logp: Tensor, valid: Tensor) -> Tensor:
    """exp in float64 where valid and not NaN, else 0; never above 1."""
    logp = logp.detach().double()
    return torch.where(valid & ~torch.isnan(logp), logp.clamp(max=0.0).exp(), 0.0)


def _unknown_probability(p_inf: Tensor, known: Tensor, unknown: Tensor, missing: Missing) -> Tensor:
    """p_inf [..., k2] taken for the tokens of the target's top k that the actor did not return."""
    if missing == "zero" or p_inf.shape[-1] == 0:
        return torch.zeros_like(unknown, dtype=torch.float64)
    smallest = torch.where(known, p_inf, 1.0).amin(-1, keepdim=True)
    residual = (1.0 - p_inf.sum(-1, keepdim=True)).clamp(min=0)
    each = torch.minimum(smallest, residual / unknown.sum(-1, keepdim=True).clamp(min=1))
    return torch.where(unknown, each, 0.0)


def obrs_divergence(
    topk_ids_inf: Tensor,
    topk_logp_inf: Tensor,
    logp_tgt_at_inf_ids: Tensor,
    *,
    lam: float = _JACKPOT.lam,
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
    first = _first_occurrence(topk_ids_inf.long())
    known = [_probability(logp, first) for logp in (topk_logp_inf, logp_tgt_at_inf_ids)]
    p_inf, p_tgt = (torch.cat([p, (1.0 - p.sum(-1, keepdim=True)).clamp(min=0)], -1) for p in known)
    # p_t/p_kept = Z max(lam, p_t/p_inf)
    z = torch.minimum(p_inf, p_tgt / lam).sum(-1)
    rises = (p_tgt / p_inf.clamp(min=TINY)).clamp(min=lam)
    divergence = z.clamp(min=TINY).log() + (p_tgt * rises.log()).sum(-1)
    return divergence.clamp(min=0).to(_result_dtype(topk_logp_inf))


def obrs_calibrate(
    z_approx: Tensor,
    accepted: Tensor,
    mask: Tensor,
    *,
    lam: float = _JACKPOT.lam,
    reduce: SumReduce | None = None,
) -> tuple[Tensor, float, float]:
    """`Z_t = clamp(kappa Z_approx, tiny, min(1, 1/lam))` with `kappa = alpha_hat / mean(Z_approx)`
    (Jackpot 4.4.2).

    Args: z_approx [B, T]; accepted [B, T], either the draws (bool: the paper's Bernoulli estimate
    of alpha_hat) or their probabilities a(x) (the same mean without the draws' noise); mask [B, T].
    Means are over the global batch's tokens. Returns (z [B, T] float32, kappa, alpha_hat). If no
    z_approx is above 0 (no top k stored), every Z_t is alpha_hat; without any token kappa and
    alpha_hat are 1. Kappa and alpha_hat are numbers, so this waits for the device;
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


def jackpot_weight(
    z: Tensor,
    logp_new: Tensor,
    logp_ref: Tensor,
    logp_inf: Tensor,
    *,
    target: Target = "new",  # the contract's; the setting's default is ref
    lam: float = _JACKPOT.lam,
    c1: float = _JACKPOT.c1,
    c2: float = _JACKPOT.c2,
) -> Tensor:
    """Jackpot's weight [B, T] of a kept token, given its normaliser z [B, T].

    target="ref": `min(z max(lam, p_ref/p_inf), c1)` (eq. 8). target="new": `min(z max(lam,
    p_new/p_inf), c1) * min(p_ref/p_new, c2)` (eq. 11). A token whose ratio is undefined (NaN) gets
    0. Biased by the two truncations alone, given the true z. z = 1 gives the weights of the mode
    without Z (`rlcore.corrections.jackpot`).
    """
    choice("target", target, ("ref", "new"))
    positive("lam", lam)
    at_least_one("c1", c1)
    at_least_one("c2", c2)
    same_shape(z=z, logp_new=logp_new, logp_ref=logp_ref, logp_inf=logp_inf)
    logp_target = logp_ref if target == "ref" else logp_new
    towards = _ratio_or_zero(logp_target, logp_inf)
    weight = (at_least_float32(z) * towards.clamp(min=lam)).clamp(max=c1)
    undefined = torch.isnan(
        at_least_float32(logp_target) - at_least_float32(logp_inf)
    ) | torch.isnan(weight)
    if target == "new":
        weight = weight * _ratio_or_zero(logp_ref, logp_new).clamp(max=c2)
    return torch.where(undefined, 0.0, weight)
