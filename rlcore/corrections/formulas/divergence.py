"""How far two policies are apart on the tokens that one of them sampled, as sums that add up over
micro-batches and ranks."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from rlcore.corrections.formulas.arguments import require, same_shape
from rlcore.corrections.formulas.numerics import CLAMP, at_least_float32, ratio, sums
from rlcore.corrections.formulas.obrs import obrs_acceptance
from rlcore.corrections.formulas.ratios import veto
from rlcore.corrections.specs import MisSpec, TisSpec

# the shares are of what TIS and MIS would touch with their usual settings
_TIS, _MIS = TisSpec(), MisSpec()
_MEANS = (
    "kl_k1",
    "kl_k3",
    "abs_dlogp_mean",
    "abs_dprob_mean",
    "acceptance",
    "w",
    "w2",
    "truncated_share",
    "masked_share",
)
_COUNTS = ("tokens", "all_tokens", "usable", "vetoed", "sequences")
_LENGTH = len(_MEANS) + len(_COUNTS)


def mismatch_accumulate(
    logp_ref: Tensor, logp_inf: Tensor, mask: Tensor, inside: Tensor | None = None
) -> Tensor:
    """Statistics [14] float64 of some of a batch's sequences, to be summed with those of others.

    Log-probs and mask [B, T], the mask before any rejection; `inside` [B, T] bool: tokens in the
    learner's safe set (DVP), None for all. Does not wait for the device.
    """
    same_shape(logp_ref=logp_ref, logp_inf=logp_inf, mask=mask)
    wanted = mask != 0
    finite = wanted & torch.isfinite(logp_inf) & torch.isfinite(logp_ref)
    on = finite if inside is None else finite & inside
    difference = at_least_float32(logp_ref) - at_least_float32(logp_inf)
    d = torch.where(on, difference, 0.0).double()
    w = ratio(d)
    # probabilities of the sampled tokens are compared unclamped: they are bounded by themselves
    dprob = torch.where(on, logp_ref.double().exp() - logp_inf.double().exp(), 0.0).abs()
    k3 = torch.expm1(d.clamp(-CLAMP, CLAMP)) - d
    acceptance = obrs_acceptance(logp_ref, logp_inf)
    outside_band = (w < _MIS.low) | (w > _MIS.high)
    values = [-d, k3, d.abs(), dprob, acceptance, w, w * w, w > _TIS.cap, outside_band]
    vetoed = ~veto(logp_ref, logp_inf, finite)
    counts = [on, wanted, finite, vetoed, wanted.any(-1)]
    return sums([*(torch.where(on, v, 0.0) for v in values), *counts])


def mismatch_values(statistics: Tensor) -> dict[str, float]:
    """The mismatch metrics of METHODS.md from summed `mismatch_accumulate`. Waits for the device.

    With d = log p_ref - log p_inf and w = exp(d): kl_k1 = mean(-d), kl_k3 = mean(w - 1 - d), ess =
    (sum w)^2 / (n sum w^2), cv the sample coefficient of variation of w, acceptance = mean(min(1,
    w)), an unbiased estimate of Z at lambda 1.
    """
    require(
        statistics.shape == (_LENGTH,),
        f"statistics has shape {list(statistics.shape)}, not [{_LENGTH}].",
    )
    found = dict(zip((*_MEANS, *_COUNTS), statistics.tolist()))
    n = max(found["tokens"], 1.0)
    metrics = {name: found[name] / n for name in _MEANS}
    mean_w, mean_w2 = metrics.pop("w"), metrics.pop("w2")
    variance = max(mean_w2 - mean_w**2, 0.0) * (n / (n - 1) if n > 1 else 0.0)
    metrics["ess"] = mean_w**2 / mean_w2 if mean_w2 > 0 else 1.0
    metrics["cv"] = sqrt(variance) / mean_w if mean_w > 0 else 0.0
    if not found["usable"]:
        metrics["acceptance"] = 1.0
    metrics["veto_share"] = found["vetoed"] / max(found["sequences"], 1.0)
    all_tokens = found["all_tokens"]
    metrics["nonfinite_share"] = 1.0 - found["usable"] / all_tokens if all_tokens else 0.0
    return metrics
