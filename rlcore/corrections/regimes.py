"""Figures of a mismatch that say whether correcting it pays, and its tails.

N*, the answers a batch needs before correction lowers the mean squared error of its gradient. T*m,
the tokens of an answer that come from the actor's probability floor (METHODS.md). The share of the
mismatch that repeats. Percentiles of the ratio p_ref/p_inf and of |log p_ref - log p_inf|, over all
tokens and by eighths of answers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rlcore.attention.specs import STRETCHES
from rlcore.corrections.break_even import NEARLY_WHOLE
from rlcore.corrections.numerics import (
    CLAMP,
    SumReduce,
    at_least_float32,
    log_difference,
    ratio,
    require,
    same_shape,
)
from rlcore.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def batch_worth_correcting(plain: Tensor, corrected: Tensor, answers: int = 1) -> float:
    """N*: the number of answers above which the corrected gradient has the smaller mean squared
    error.

    plain, corrected [K, D]: the uncorrected and the corrected gradient of K parts of a batch; K = 2
    are two halves. Each is the mean over `answers` answers, with respect to any D parameters or
    projections of them. The corrected gradient counts as unbiased. With means over all parts

        bias^2 = mean over pairs i != j of (plain_i - corrected_i) (plain_j - corrected_j)
        N* = (var(corrected) - var(plain)) / bias^2,   variances of one answer

    inf if no bias is seen, 0 if the corrected gradient varies less, too. Waits for the device.
    """
    bias2, extra = _bias_and_variance(plain, corrected, answers)
    return math.inf if bias2 <= 0 else max(extra / bias2, 0.0)


def _bias_and_variance(plain: Tensor, corrected: Tensor, answers: float) -> tuple[float, float]:
    """(bias^2, var(corrected) - var(plain)) of `batch_worth_correcting`."""
    same_shape(plain=plain, corrected=corrected)
    parts = len(plain)
    require(parts >= 2, f"plain has {parts} rows: two parts of a batch are needed.")
    wide = [at_least_float32(g).double() for g in (plain, corrected)]
    difference = wide[0] - wide[1]
    pairs = difference.sum(0).square().sum() - difference.square().sum()
    spread = [(g - g.mean(0)).square().sum() * answers / (parts - 1) for g in wide]
    return (pairs / (parts * (parts - 1))).item(), (spread[1] - spread[0]).item()


def fixed_share(
    logp_ref: Tensor,
    logp_inf: Tensor,
    mask: Tensor,
    repeats: Tensor,
    reduce: SumReduce | None = None,
) -> dict[str, float]:
    """How much of the mismatch is the same each time that a token is sampled after the same ones.

    Rounded weights, another model and older weights are off by a function of the context; noise, or
    sums in another order, by an error that is drawn anew. Actors with such an error sample from its
    mean q = E[p_inf], and the ratio w = p_ref/p_inf has the mean p_ref/q given context and token.
    That part of it biases an uncorrected gradient. All of it adds variance to a corrected one. With
    u = min(w, 10) - 1 of the n >= 2 tokens that have equal `repeats`, and sums over such sets,

        fixed_share = sum ((sum u)^2 - sum u^2)/(n - 1) / sum (sum u^2),

    products of different draws over squares. In expectation it is chi^2(p_ref || q) over the mean
    of chi^2(p_ref || p_inf) where no w is above 10. It is 1 for a fixed error, near 0 for a fresh
    one. Also "repeated_share", such tokens over all; fixed_share is not there without any that
    differ. Log-probs, mask and repeats [B, T] (int64, equal for tokens of equal context and id; a
    run's `StepTensors.repeats` is so within groups). Waits for the device.
    """
    same_shape(logp_ref=logp_ref, logp_inf=logp_inf, mask=mask, repeats=repeats)
    difference, usable = log_difference(logp_ref, logp_inf, mask)
    u = ratio(difference[usable].double()).clamp(max=NEARLY_WHOLE) - 1.0
    _, place, count = torch.unique(repeats[usable], return_inverse=True, return_counts=True)
    total, squares = (torch.bincount(place, v, minlength=len(count)) for v in (u, u * u))
    again = count > 1
    products = (total.square() - squares) / (count - 1).clamp(min=1)
    found = [products[again].sum(), squares[again].sum(), count[again].sum(), count.sum()]
    summed = torch.stack([value.double() for value in found])
    fixed, whole, repeated, tokens = (summed if reduce is None else reduce(summed)).tolist()
    shares = {"repeated_share": repeated / max(tokens, 1.0)}
    return shares | ({"fixed_share": fixed / whole} if whole > 0 else {})


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


FEWEST = 40  # tokens outside the safe set from which on their slope is told


def tail_slope(
    logp_ref: Tensor,
    logp_inf: Tensor,
    logp_max: Tensor,
    outside: Tensor,
    reduce: SumReduce | None = None,
) -> dict[str, float]:
    """Figures that tell a floor of probabilities from another error; {} below 40 tokens outside the
    safe set. "tail_slope" is the slope of log p_inf on log p_ref over these tokens. "floor_level"
    is the geometric mean of their p_inf over the largest p_ref.

    The slope is 1.00 for errors of any size and 0.91 for a temperature of 1.1. It is 0.03 to 0.23
    for a floor, under which p_inf does not depend on p_ref (METHODS.md). Log-probs [B, T], logp_max
    of the learner's likeliest token; outside [B, T] bool. Waits for the device.
    """
    on = outside & torch.isfinite(logp_ref) & torch.isfinite(logp_inf)
    x, y, top = (
        at_least_float32(v).double().where(on, 0.0) for v in (logp_ref, logp_inf, logp_max)
    )
    summed = torch.stack([v.sum() for v in (on.double(), x, y, x * x, x * y, y - top)])
    n, sx, sy, sxx, sxy, level = (summed if reduce is None else reduce(summed)).tolist()
    spread = n * sxx - sx * sx
    if n < FEWEST or spread <= 0:
        return {}
    return {"tail_slope": (n * sxy - sx * sy) / spread, "floor_level": math.exp(level / n)}


PERCENTILES = (1, 5, 50, 95, 99)
EIGHTHS = 8  # parts of each answer
SPARROW = 0.86  # agreement that sparse actors are held at (Sparrow, arXiv 2606.08446)
_BINS, _LEAST = 256, 1e-4  # of |d|, in equal steps of its logarithm from _LEAST to CLAMP nats


def mismatch_tails(
    logp_ref: Tensor, logp_inf: Tensor, on: Tensor, reduce: SumReduce | None = None
) -> dict[str, float]:
    """Percentiles over the tokens `on` of all ranks, without the group "mismatch/". They are of the
    ratio r = p_ref/p_inf (`ratio_p5`) and of |log r| (`abs_dlogp_p95`), both also by eighths of
    answers (`eighth_1/...`). Percentiles of min(r, 1/r) (`agreement_p5`) come with the share of
    tokens below 0.86.

    Log-probs [B, T], on [B, T] bool. They are read from counts of |log r| in bins of 5%, which add
    up over ranks. So a percentile of |log r| is off by at most 2.5% of itself; below 1e-4 it is 0.
    Empty without a token.
    """
    counts, below = _counted(logp_ref, logp_inf, on)
    if reduce is not None:
        both = reduce(torch.cat([counts.flatten(), below[None]]))
        counts, below = both[:-1].view(counts.shape), both[-1]
    every = counts.sum(0)
    if not every.any():
        return {}
    found = _percentiles(every)
    found["agreement_p5"] = math.exp(-found["abs_dlogp_p95"])
    found["below_086_share"] = (below / every.sum()).item()
    for number, own in enumerate(counts, start=1):
        if own.any():
            found |= {f"eighth_{number}/{name}": v for name, v in _percentiles(own).items()}
    return found


def agreement_by_stretch(
    logp_ref: Tensor,
    logp_inf: Tensor,
    on: Tensor,
    stretch: Tensor,
    reduce: SumReduce | None = None,
) -> dict[str, float]:
    """`stretch_<n>/agreement_p5`: `agreement_p5` of `mismatch_tails` over the tokens of stretch n -
    1, for each stretch that has tokens.

    stretch [B, T] int64, 0 .. STRETCHES - 1, or -1 for a token that belongs to none.
    """
    on = on & (stretch >= 0)
    size, _ = _sizes(logp_ref, logp_inf, on)
    width = _BINS + 2
    counts = torch.bincount((stretch * width + size)[on], minlength=STRETCHES * width)
    counts = counts.view(STRETCHES, width).double()
    if reduce is not None:
        counts = reduce(counts.flatten()).view(counts.shape)
    found = {}
    for number, own in enumerate(counts, start=1):
        if own.any():
            reached = own.cumsum(0) / own.sum()
            at = int((reached < 0.95 - 1e-12).sum())
            found[f"stretch_{number}/agreement_p5"] = math.exp(-float(_middles(own)[at]))
    return found


def _sizes(logp_ref: Tensor, logp_inf: Tensor, on: Tensor) -> tuple[Tensor, Tensor]:
    """The bin of |d| of each token, and d = log p_ref - log p_inf, 0 where it is not `on`."""
    difference = (at_least_float32(logp_ref) - at_least_float32(logp_inf)).where(on, 0.0)
    edges = torch.logspace(
        math.log10(_LEAST), math.log10(CLAMP), _BINS + 1, device=on.device, dtype=difference.dtype
    )
    return torch.bucketize(difference.abs(), edges), difference


def _middles(like: Tensor) -> Tensor:
    """|d| of each bin, in nats [_BINS + 2] float64, on the device of `like`."""
    step = math.log(CLAMP / _LEAST) / _BINS
    middles = _LEAST * torch.exp(step * (torch.arange(_BINS, device=like.device) + 0.5)).double()
    return torch.cat([middles.new_zeros(1), middles, middles.new_full((1,), CLAMP)])


def eighths(on: Tensor) -> Tensor:
    """[B, T] int64, 0..7: the eighth of its answer that each token `on` [B, T] bool lies in."""
    length = on.sum(-1, keepdim=True).clamp(min=1)
    return (EIGHTHS * (on.cumsum(-1) - 1) // length).clamp(0, EIGHTHS - 1)


def _counted(logp_ref: Tensor, logp_inf: Tensor, on: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens by eighth and bin [8, 2 * _BINS + 3] float64, and of an agreement below 0.86."""
    size, difference = _sizes(logp_ref, logp_inf, on)
    place = _BINS + 1 + torch.where(difference < 0, -size, size)
    width = 2 * _BINS + 3
    counts = torch.bincount((eighths(on) * width + place)[on], minlength=EIGHTHS * width)
    below = ((difference.abs() > -math.log(SPARROW)) & on).sum(dtype=torch.float64)
    return counts.view(EIGHTHS, width).double(), below


def _percentiles(counts: Tensor) -> dict[str, float]:
    """Percentiles of the ratio and of |log r|, from tokens by bin."""
    sizes = _middles(counts)
    ends = {"ratio": torch.cat([-sizes.flip(0), sizes[1:]]), "abs_dlogp": sizes}
    centre = _BINS + 1
    folded = counts[centre:] + counts[: centre + 1].flip(0)
    folded[0] = counts[centre]
    found = {}
    for name, tokens in (("ratio", counts), ("abs_dlogp", folded)):
        reached = tokens.cumsum(0) / tokens.sum()
        for percent in PERCENTILES:
            # rounding must not ask for more than all of the tokens
            at = int((reached < percent / 100 - 1e-12).sum())
            value = float(ends[name][at])
            found[f"{name}_p{percent}"] = math.exp(value) if name == "ratio" else value
    return found
