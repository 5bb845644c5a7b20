"""Distance and age of the actor's policy relative to the learner's, measured independently of the
correction.

Taken over the response mask before any rejection, globally: sums and counts are reduced over
data-parallel ranks before anything is divided. Tokens without a usable log-prob (`nonfinite_share`)
and tokens outside the learner's safe set (`outside_share`, DVP) have no ratio and are left out of
the rest.
"""

from __future__ import annotations

import math
from math import sqrt
from typing import TYPE_CHECKING

from rlcore.corrections.ais import AisSpec, ais
from rlcore.corrections.dvp import DvpSpec
from rlcore.corrections.mis import MisSpec
from rlcore.corrections.numerics import (
    CLAMP,
    at_least_float32,
    inside,
    require,
    same_shape,
    sums,
    total,
)
from rlcore.corrections.obrs import obrs_acceptance, obrs_calibrate, obrs_normalizer
from rlcore.corrections.regimes import (
    agreement_by_stretch,
    fixed_share,
    floor_tokens,
    mismatch_tails,
    tail_slope,
)
from rlcore.corrections.tis import TisSpec
from rlcore.corrections.veto import veto
from rlcore.interfaces import Reduce
from rlcore.lazy import torch
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor


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
WIDEST = 300.0  # exp of twice this, summed over any batch, is finite in float64
_COUNTS = ("tokens", "all_tokens", "usable", "vetoed", "sequences")
_LENGTH = len(_MEANS) + len(_COUNTS)


def mismatch_accumulate(
    logp_ref: Tensor, logp_inf: Tensor, mask: Tensor, inside: Tensor | None = None
) -> Tensor:
    """Statistics [14] float64 of some of a batch's sequences, to be summed with others'.

    Log-probs and mask [B, T], the mask before any rejection; `inside` [B, T] bool: tokens in the
    learner's safe set (DVP), None for all. Does not wait for the device.
    """
    same_shape(logp_ref=logp_ref, logp_inf=logp_inf, mask=mask)
    wanted = mask != 0
    finite = wanted & torch.isfinite(logp_inf) & torch.isfinite(logp_ref)
    on = finite if inside is None else finite & inside
    difference = at_least_float32(logp_ref) - at_least_float32(logp_inf)
    d = torch.where(on, difference, 0.0).double()
    # Clamped far beyond any log-prob and not at +-20: the ESS and the coefficient of variation do
    # not depend on a common factor, so a ratio that is small everywhere must stay small.
    w = d.clamp(-WIDEST, WIDEST).exp()
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
    (sum w)^2 / (n sum w^2). cv is the sample coefficient of variation of w, and acceptance =
    mean(min(1, w)), an unbiased estimate of Z at lambda 1.
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
    metrics["ratio_cv"] = sqrt(variance) / mean_w if mean_w > 0 else 0.0
    if not found["usable"]:
        metrics["acceptance"] = 1.0
    metrics["veto_share"] = found["vetoed"] / max(found["sequences"], 1.0)
    all_tokens = found["all_tokens"]
    metrics["nonfinite_share"] = 1.0 - found["usable"] / all_tokens if all_tokens else 0.0
    return metrics


AGE_BINS = (0, 1, 2, 4, 8, 16, 32, 64, 128)  # lower edges, in optimizer steps; the last bin is open


def mismatch_metrics(step: StepTensors, reduce: Reduce, ais_spec: AisSpec) -> dict[str, float]:
    """`mismatch/*` of METHODS.md for one step, over ranks. `step.mask` is the response mask before
    rejection.

    See `mismatch_values` for most of them. ais_* are what AIS with `ais_spec` would see; z_approx,
    kappa and unknown_share appear where the step holds the top-k log-probs of both sides.
    """
    finite = step.mask & torch.isfinite(step.logp_inf) & torch.isfinite(step.logp_ref)
    on = inside(step, finite)
    summed = reduce(mismatch_accumulate(step.logp_ref, step.logp_inf, step.mask, step.ref_inside))
    metrics = mismatch_values(summed)
    metrics["tokens"] = summed[_LENGTH - len(_COUNTS)].item()
    difference = at_least_float32(step.logp_ref) - at_least_float32(step.logp_inf)
    # a maximum does not add up: the one that takes a reduction of its own
    metrics["abs_dlogp_max"] = _maximum(torch.where(on, difference, 0.0).double().abs(), reduce)
    _, signals = ais(
        step.logp_ref,
        step.logp_inf,
        step.advantages,
        on,
        **ais_spec.model_dump(exclude={"alpha"}),
        reduce=reduce,
    )
    metrics |= {f"ais_{name}": value for name, value in signals.items()}
    if step.ref_inside is not None and step.coverage is not None:
        covered, held, usable = total([step.coverage.where(finite, 0.0), on, finite], reduce)
        metrics["coverage_mean"] = covered / usable if usable else 1.0
        metrics["outside_share"] = 1.0 - held / usable if usable else 0.0
    metrics |= _normalizer_metrics(step, on, reduce) | _unlikely(step, finite, reduce)
    metrics |= mismatch_tails(step.logp_ref, step.logp_inf, on, reduce)
    if step.repeats is not None:
        metrics |= fixed_share(step.logp_ref, step.logp_inf, on, step.repeats, reduce)
    if step.stretch is not None:
        metrics |= agreement_by_stretch(step.logp_ref, step.logp_inf, on, step.stretch, reduce)
    return {f"mismatch/{name}": value for name, value in metrics.items()}


def _maximum(values: Tensor, reduce: Reduce) -> float:
    """Largest of some non-negative values over all ranks, 0 for none."""
    flat = torch.cat([values.flatten(), values.new_zeros(1)])
    return reduce.max(flat.max()[None]).item()


def _unlikely(step: StepTensors, on: Tensor, reduce: Reduce) -> dict[str, float]:
    """Tokens that a safe set of DVP's default would leave out, where the learner's top k is known
    and no safe set is on already. Also, under either set, what of them the actors' probability
    floor has drawn."""
    if step.ref_inside is not None:
        outside = on & ~step.ref_inside
    elif step.ref_topk_logp is not None:
        outside = on & (step.logp_ref < step.ref_topk_logp.amax(-1) + math.log(DvpSpec().rho))
    else:
        return {}
    drawn = floor_tokens(step.logp_ref, step.logp_inf, outside, on)
    out, n, floor, answers = total([outside, on, drawn, on.any(-1)], reduce)
    found = {"floor_tokens": floor / max(answers, 1.0), "floor_mass": floor / max(n, 1.0)}
    if step.ref_inside is not None or step.ref_topk_logp is None:
        return found
    found["unlikely_share"] = out / max(n, 1.0)
    largest = step.ref_topk_logp.amax(-1)
    return found | tail_slope(step.logp_ref, step.logp_inf, largest, outside, reduce)


def _normalizer_metrics(step: StepTensors, on: Tensor, reduce: Reduce) -> dict[str, float]:
    """OBRS's normaliser at lambda 1 with the residual tail, where the actors store their top k."""
    ids, logp, at_inf = step.ref_topk_ids, step.ref_topk_logp, step.ref_logp_at_inf_ids
    if (
        step.topk_ids_inf is None
        or step.topk_logp_inf is None
        or ids is None
        or logp is None
        or at_inf is None
    ):
        return {}
    z, unknown = obrs_normalizer(
        step.topk_ids_inf, step.topk_logp_inf, ids, logp, at_inf, tail="residual"
    )
    acceptance = obrs_acceptance(step.logp_ref, step.logp_inf)
    _, kappa, _ = obrs_calibrate(z, acceptance, on, reduce=reduce)
    z_sum, unknown_sum, n = total([z.where(on, 0.0), unknown.where(on, 0.0), on], reduce)
    return {
        "z_approx": z_sum / max(n, 1.0),
        "kappa": kappa,
        "unknown_share": unknown_sum / max(n, 1.0),
    }


def policy_age(
    token_version: Tensor, mask: Tensor, version: int, reduce: Reduce
) -> dict[str, float]:
    """Staleness `version - token_version` of the masked tokens at the step that turns `version`
    into `version + 1`.

    token_version [B, T] int, mask [B, T]. Keys: staleness/mean, staleness/max, and the share of
    tokens in each bin of ages, staleness/share_0, _1, _2, _4, ... (lower edges in optimizer steps,
    the last open). Raises ValueError for a token of a later version than the learner's: a
    bookkeeping error."""
    on = mask != 0
    age = torch.where(on, version - token_version.long(), 0)
    if (age < 0).any():
        newest = int(token_version[on].max())
        raise ValueError(f"a token of version {newest} reached the step of version {version}")
    edges = torch.tensor(AGE_BINS[1:], device=age.device)
    bins = torch.bucketize(age, edges, right=True)
    shares = [(bins == i) & on for i in range(len(AGE_BINS))]
    age_sum, n, *hits = total([age, on, *shares], reduce)
    metrics = {
        "staleness/mean": age_sum / max(n, 1.0),
        "staleness/max": _maximum(age.double(), reduce),
    }
    return metrics | {
        f"staleness/share_{edge}": hit / max(n, 1.0) for edge, hit in zip(AGE_BINS, hits)
    }
