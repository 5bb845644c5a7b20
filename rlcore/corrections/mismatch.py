"""How far the actor's policy is from the learner's, and how old it is: the same numbers whatever the correction.

Taken over the response mask before any rejection, globally: sums and counts are reduced over data-parallel ranks before
anything is divided. Tokens without a usable log-prob (`nonfinite_share`) and tokens outside the learner's safe set
(`outside_share`, DVP) have no ratio and are left out of the rest.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from rlcore.corrections.formulas.numerics import at_least_float32, ratio, total
from rlcore.corrections.functional import ais, obrs_acceptance, obrs_calibrate, obrs_normalizer, veto
from rlcore.interfaces import Reduce
from rlcore.types import StepTensors

VETO, TRUNCATED, MASKED = 1e-4, 2.0, (0.5, 2.0)  # the usual thresholds, for the shares that those methods would touch
AGE_BINS = (0, 1, 2, 4, 8, 16, 32, 64, 128)  # lower edges, in optimizer steps; the last bin is open


def mismatch_metrics(step: StepTensors, reduce: Reduce) -> dict[str, float]:
    """`mismatch/*` of METHODS.md for one step, over ranks. `step.mask` is the response mask before rejection.

    With d = log p_ref - log p_inf and w = exp(d): kl_k1 = mean(-d), kl_k3 = mean(w - 1 - d), ess = (sum w)^2 / (n sum
    w^2), cv the sample coefficient of variation of w, acceptance = mean(min(1, w)), an unbiased estimate of Z at
    lambda 1. z_approx, kappa and unknown_share appear where the step holds the top-k log-probs of both sides.
    """
    wanted = step.mask
    finite = wanted & torch.isfinite(step.logp_inf) & torch.isfinite(step.logp_ref)
    on = finite if step.inside is None else finite & step.inside
    d = torch.where(on, at_least_float32(step.logp_ref) - at_least_float32(step.logp_inf), 0.0).double()
    w = ratio(d)
    dprob = torch.where(on, step.logp_ref.double().exp() - step.logp_inf.double().exp(), 0.0).abs()
    acceptance = obrs_acceptance(step.logp_ref, step.logp_inf)
    k3 = torch.expm1(d.clamp(-20, 20)) - d
    shares = [w > TRUNCATED, (w < MASKED[0]) | (w > MASKED[1])]
    values = [-d, k3, d.abs(), dprob, acceptance, w, w * w, *(s.double() for s in shares)]
    *sums, n, all_tokens, usable = total([*(v.where(on, 0.0) for v in values), on, wanted, finite], reduce)
    n = max(n, 1.0)
    kl_k1, kl_k3, abs_dlogp, abs_dprob, accepted, mean_w, mean_w2, truncated, masked = (s / n for s in sums)
    variance = max(mean_w2 - mean_w**2, 0.0) * (n / (n - 1) if n > 1 else 0.0)
    vetoed, sequences = total([~veto(step.logp_ref, step.logp_inf, finite), wanted.any(-1)], reduce)
    metrics = {
        "kl_k1": kl_k1,
        "kl_k3": kl_k3,
        "abs_dlogp_mean": abs_dlogp,
        "abs_dlogp_max": _maximum(d.abs(), reduce),
        "abs_dprob_mean": abs_dprob,
        "ess": mean_w**2 / mean_w2 if mean_w2 > 0 else 1.0,
        "cv": sqrt(variance) / mean_w if mean_w > 0 else 0.0,
        "acceptance": accepted if usable else 1.0,
        "truncated_share": truncated,
        "masked_share": masked,
        "veto_share": vetoed / max(sequences, 1.0),
        "nonfinite_share": 1.0 - usable / all_tokens if all_tokens else 0.0,
    }
    _, signals = ais(step.logp_ref, step.logp_inf, step.advantages, on, reduce=reduce)
    metrics |= {f"ais_{name}": value for name, value in signals.items()}
    if step.inside is not None and step.coverage is not None:
        covered, inside = total([step.coverage.where(finite, 0.0), on], reduce)
        metrics["coverage_mean"] = covered / usable if usable else 1.0
        metrics["outside_share"] = 1.0 - inside / usable if usable else 0.0
    metrics |= _normalizer_metrics(step, on, acceptance, reduce)
    return {f"mismatch/{name}": value for name, value in metrics.items()}


def _maximum(values: Tensor, reduce: Reduce) -> float:
    """Largest of some non-negative values over all ranks, 0 for none."""
    flat = torch.cat([values.flatten(), values.new_zeros(1)])
    return reduce.max(flat.max()[None]).item()


def _normalizer_metrics(step: StepTensors, on: Tensor, acceptance: Tensor, reduce: Reduce) -> dict[str, float]:
    """OBRS's normaliser at lambda 1 with the residual tail, where the actors store their top k."""
    ids, logp, at_inf = step.ref_topk_ids, step.ref_topk_logp, step.ref_logp_at_inf_ids
    if step.topk_ids_inf is None or step.topk_logp_inf is None or ids is None or logp is None or at_inf is None:
        return {}
    z, unknown = obrs_normalizer(step.topk_ids_inf, step.topk_logp_inf, ids, logp, at_inf, tail="residual")
    _, kappa, _ = obrs_calibrate(z, acceptance, on, reduce=reduce)
    z_sum, unknown_sum, n = total([z.where(on, 0.0), unknown.where(on, 0.0), on], reduce)
    return {"z_approx": z_sum / max(n, 1.0), "kappa": kappa, "unknown_share": unknown_sum / max(n, 1.0)}


def policy_age(token_version: Tensor, mask: Tensor, version: int, reduce: Reduce) -> dict[str, float]:
    """Staleness `version - token_version` of the masked tokens at the step that turns `version` into `version + 1`.

    token_version [B,T] int, mask [B,T]. Keys: staleness/mean, staleness/max, and the share of tokens in each bin of
    ages, staleness/share_0, _1, _2, _4, ... (lower edges in optimizer steps, the last open). Raises ValueError for a
    token from the future, which would mean that versions are counted wrongly.
    """
    on = mask != 0
    age = torch.where(on, version - token_version.long(), 0)
    if (age < 0).any():
        raise ValueError(f"a token of version {int(token_version[on].max())} reached the step of version {version}")
    edges = torch.tensor(AGE_BINS[1:], device=age.device)
    bins = torch.bucketize(age, edges, right=True)
    shares = [(bins == i) & on for i in range(len(AGE_BINS))]
    age_sum, n, *hits = total([age, on, *shares], reduce)
    metrics = {"staleness/mean": age_sum / max(n, 1.0), "staleness/max": _maximum(age.double(), reduce)}
    return metrics | {f"staleness/share_{edge}": hit / max(n, 1.0) for edge, hit in zip(AGE_BINS, hits)}
