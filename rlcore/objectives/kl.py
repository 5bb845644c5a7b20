"""KL(p_new || p_base): estimators on sampled tokens, the full sum over the vocabulary, and entropy.

In a loss, a sampled KL is corrected like the policy loss. Its tokens are the actor's, so it carries
the ratio to p_new (`penalty_weight`). A token that the corrections dropped has no KL
(`kl_penalty`). The full KL sums over the vocabulary at each state and carries no ratio.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Literal

from rlcore.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from rlcore.objectives.specs import ObjectiveSpec


CLAMP = 20.0  # of log differences before exp: larger differences carry no further information


def at_least_float32(values: Tensor) -> Tensor:
    """Half precisions widened to float32; float64 stays, so that tests can be exact."""
    return values if values.dtype == torch.float64 else values.float()


Estimator = Literal["k1", "k2", "k3"]
# Bound of p_base/p_new in k3 as a penalty: beyond it the value stays at 6.7 nats and the gradient's
# size at 9, where the gradient of a clamped value would vanish.
RATIO_BOUND = 10.0


def sampled_kl(kind: Estimator, logp_new: Tensor, logp_base: Tensor, mask: Tensor) -> Tensor:
    """Estimate of KL(p_new || p_base) per token [B, T] float32 from tokens x ~ p_new; 0 where the
    mask is 0.

    With d = log p_base - log p_new: k1 = -d (unbiased), k2 = d^2/2 (biased, low variance), k3 =
    exp(d) - 1 - d (unbiased, never negative). `logp_new` carries the gradient, which in expectation
    is the KL's for k2, zero for k1 and the forward KL's for k3: see `kl_penalty` for a loss.
    """
    difference = at_least_float32(logp_base.detach()) - at_least_float32(logp_new)
    d = torch.where(mask != 0, difference, 0.0)
    if kind == "k1":
        return -d
    if kind == "k2":
        return 0.5 * d * d
    d = d.clamp(-CLAMP, CLAMP)
    return torch.expm1(d) - d


def penalty_weight(
    logp_new: Tensor, logp_from: Tensor, weight: Tensor, mask: Tensor, *, cap: float
) -> Tensor:
    """`SG(weight * min(p_new/p_from, cap))` [B, T]: leads tokens that `weight` led to p_from on to
    p_new. 0 where the weight or the mask is 0, or the ratio is undefined."""
    difference = at_least_float32(logp_new.detach()) - at_least_float32(logp_from.detach())
    on = (mask != 0) & (weight != 0) & ~torch.isnan(difference)
    ratio = torch.where(on, difference, 0.0).clamp(-CLAMP, CLAMP).exp().clamp(max=cap)
    return torch.where(on, at_least_float32(weight.detach()) * ratio, 0.0)


def kl_penalty(kind: Estimator, logp_new: Tensor, logp_base: Tensor, weight: Tensor) -> Tensor:
    """The KL term of a loss per token [B, T]: estimated value times `weight` (of `penalty_weight`,
    0 where a token has no KL), with the gradient to descend.

    k1 and k2: the gradient of KL(p_new || p_base), by the score `weight (log p_new - log p_base)
    grad log p_new` (differentiating k1's value would give 0 in expectation). k3: the gradient of
    the forward KL(p_base || p_new), GRPO's convention. Values are bounded: log differences at +-20,
    and k3's p_base/p_new at 10, in value and in gradient. That bound and the cap of the weight are
    the only biases. `logp_new` carries the gradient.
    """
    on = weight != 0
    logp_new = torch.where(on, at_least_float32(logp_new), 0.0)
    base = torch.where(on, at_least_float32(logp_base.detach()), 0.0)
    d = (base - logp_new.detach()).clamp(-CLAMP, CLAMP)
    slope = -d
    if kind == "k1":
        value = -d
    elif kind == "k2":
        value = 0.5 * d * d
    else:
        d = d.clamp(max=log(RATIO_BOUND))
        value = torch.expm1(d) - d
        slope = -torch.expm1(d)
    # the gradient is that of `slope` alone, so that value and gradient can be bounded separately
    return weight.detach() * (value + slope * (logp_new - logp_new.detach()))


# A KL in the reward, as InstructGPT's PPO and REINFORCE++ have it (arXiv 2501.03262, eq. 8 and 9).


def kl_to_go(logp: Tensor, logp_base: Tensor, mask: Tensor) -> Tensor:
    """Sum of k1 over a token and those after it, [B, T] float64; tokens off the mask count 0. Its
    mean over answers of the policy of `logp` is the KL of the rest of an answer. Log differences
    are bounded at +-20. All arguments [B, T], detached.
    """
    d = sampled_kl("k1", logp, logp_base, mask).clamp(-CLAMP, CLAMP).double()
    return d.flip(-1).cumsum(-1).flip(-1)


class KlController:
    """The coefficient of a KL in the reward: fixed, or in proportion to its relative error (Ziegler
    et al. 2019, arXiv 1909.08593, section 2.2).

    After each step `value *= 1 + clip(kl/target - 1, -0.2, 0.2) * answers/horizon`.
    """

    def __init__(self, spec: ObjectiveSpec) -> None:
        self.value = spec.kl_coef
        self._target = spec.kl_target
        self._horizon = spec.kl_horizon

    def follow(self, kl: float, answers: float) -> None:
        """Take the mean KL of a step's answers, in nats."""
        if self._target is not None:
            error = min(max(kl / self._target - 1.0, -0.2), 0.2)
            self.value *= 1.0 + error * min(answers / self._horizon, 1.0)


def full_kl(logprobs_new: Tensor, logprobs_base: Tensor) -> Tensor:
    """Exact `sum_x p_new(x) (log p_new(x) - log p_base(x))` [...] float32 over log-probs [..., V].

    Call it on chunks of positions: it holds a few tensors of its inputs' size. Tokens that p_new
    excludes (-inf) add 0.
    """
    new = at_least_float32(logprobs_new)
    base = at_least_float32(logprobs_base.detach())
    possible = torch.isfinite(new)
    new = torch.where(possible, new, 0.0)
    base = torch.where(possible, base, 0.0)
    return torch.where(possible, new.exp() * (new - base), 0.0).sum(-1)


def entropy(logprobs: Tensor) -> Tensor:
    """`-sum_x p(x) log p(x)` [...] float32 in nats over log-probs [..., V]; excluded tokens (-inf)
    add 0."""
    logp = at_least_float32(logprobs)
    logp = torch.where(torch.isfinite(logp), logp, -1e4)
    return -(logp.exp() * logp).sum(-1)


MIN_TAIL = 1e-6  # mass below which the tail is rounding noise


# DistillSparse: reverse KL of the sparse actor's policy to the dense policy, on the actor's own
# samples.
#
# DistillSparse, algorithm 1 step 7: with theta frozen, phi steps on `L_PPO_sparse + lambda *
# KL(sparse || dense)`. Here p_s is the sparse policy (theta + phi, which carries the gradient) and
# p_d the dense one (theta, detached: the log-probs of step 4). Every function gives the KL of the
# next token at the states the actor visited, one value per token.


def distill_sampled(
    kind: Literal["k1", "k3"],
    logp_sparse: Tensor,
    logp_dense: Tensor,
    mask: Tensor,
    weight: Tensor | None = None,
) -> Tensor:
    """KL(p_s || p_d) per token [B, T] float32 from the sampled tokens; 0 where the mask is 0.

    The value is the k1 or k3 estimate (see `rlcore.objectives.kl`), the gradient the reverse KL's
    for both. All tensors [B, T]; weight: detached ratio p_s/p_inf, truncated as configured, when
    the samples are older than phi; None is 1."""
    value = sampled_kl(kind, logp_sparse, logp_dense, mask).detach()
    # Differentiating the k1 value gives zero on average, the k3 value the forward KL's gradient. So
    # both carry `(log p_s - log p_d) * grad log p_s`, whose mean over p_s is the reverse KL's.
    logp = torch.where(mask != 0, logp_sparse.float(), 0.0)
    score = torch.where(mask != 0, (logp_sparse - logp_dense).detach().float(), 0.0) * logp
    kl = value + score - score.detach()
    return kl if weight is None else torch.where(mask != 0, weight.detach().float(), 0.0) * kl


def distill_topk(
    logp_sparse_at: Tensor, logp_dense_at: Tensor, ids: Tensor, mask: Tensor
) -> Tensor:
    """KL(p_s || p_d) per token [B, T] float32 over k tokens and one bin for all others; 0 where the
    mask is 0.

    logp_sparse_at and logp_dense_at [B, T, k] are both models' log-probs of the tokens `ids` [B, T,
    k] (the actor's stored top k; -1 pads). Never above the full KL, equal to it when the ids cover
    the whole vocabulary or all of the mass."""
    known = (
        (ids >= 0)
        & (mask != 0).unsqueeze(-1)
        & torch.isfinite(logp_sparse_at)
        & torch.isfinite(logp_dense_at)
    )
    sparse = torch.where(known, logp_sparse_at.float(), 0.0)
    dense = torch.where(known, logp_dense_at.detach().float(), 0.0)
    p_sparse, p_dense = (torch.where(known, x.exp(), 0.0) for x in (sparse, dense))
    inside = (p_sparse * (sparse - dense)).sum(-1)
    rest_sparse = (1 - p_sparse.sum(-1)).clamp(min=MIN_TAIL)
    rest_dense = (1 - p_dense.sum(-1)).clamp(min=MIN_TAIL)
    tail = rest_sparse * (rest_sparse / rest_dense).log()
    return torch.where(mask != 0, inside + tail, 0.0)
