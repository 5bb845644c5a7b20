"""Distances of a policy to a teacher at the states that were visited. They are reverse and forward
KL and the generalised Jensen-Shannon divergence, over the whole vocabulary or the teacher's k
likeliest tokens.

With p the policy, which carries the gradient, q the teacher and m = w q + (1 - w) p

    reverse   KL(p || q)
    forward   KL(q || p)
    js        w KL(q || m) + (1 - w) KL(p || m)

(js: GKD, arXiv 2306.13649, section 3.) The value is for the next token at one state; how the
policy changes which states are visited is left out, as in GKD.

Where a teacher is known at its k likeliest tokens, the others are

    bucket    one outcome: a distance of coarser distributions, never above the whole one and equal
              to it where k covers the vocabulary. Its gradient does not tell the others apart.
    drop      absent: both policies are conditioned on the k tokens. Nothing holds the mass outside.
    sampled   reverse alone: estimated from the sampled token where it is none of the k, by its
              ratio p/p_inf. Value and gradient have the whole KL's expectation, exactly while the
              ratio's cap does not bind (`sampled_rest`).

No torch at import.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from rlcore.lazy import torch
from rlcore.objectives.kl import MIN_TAIL, at_least_float32, distill_sampled

if TYPE_CHECKING:
    from torch import Tensor

    from rlcore.objectives.specs import TeacherSpec


def divergence(logp: Tensor, logp_teacher: Tensor, spec: TeacherSpec) -> Tensor:
    """The distance [...] over outcomes [..., n], which both policies' log-probs give a sum of 1.

    An outcome that a policy excludes (-inf) adds what its limit does; the reverse KL to a teacher
    that excludes what the policy does not is infinite.
    """
    p, q = at_least_float32(logp), at_least_float32(logp_teacher.detach())
    if spec.divergence == "reverse":
        return _kl(p, q)
    if spec.divergence == "forward":
        return _kl(q, p)
    w = spec.js_weight
    on = torch.isfinite(p) | torch.isfinite(q)  # of no outcome at all the sum has no derivative
    middle = torch.logaddexp(
        torch.where(on, q, 0.0) + log(w), torch.where(on, p, 0.0) + log(1.0 - w)
    )
    return w * _kl(q, middle) + (1.0 - w) * _kl(p, middle)


def topk_divergence(logp_at: Tensor, teacher_at: Tensor, ids: Tensor, spec: TeacherSpec) -> Tensor:
    """The distance [...] from both policies' log-probs [..., k] at the teacher's tokens `ids`
    [..., k] (-1 pads), the rest by `spec.tail`; 0 without a single token.

    With tail=sampled the part of the k tokens alone, each as `p log(p/q) - p + q`, which is never
    negative: `sampled_rest` has the same for the rest.
    """
    known = (ids >= 0) & torch.isfinite(teacher_at)
    p = torch.where(known, at_least_float32(logp_at), -torch.inf)
    q = torch.where(known, at_least_float32(teacher_at.detach()), -torch.inf)
    if spec.tail == "sampled":
        return _terms(p, q).sum(-1)
    empty = ~known.any(-1)
    if spec.tail == "drop":
        p, q = (torch.where(empty[..., None], 0.0, x) for x in (p, q))
        p, q = p.log_softmax(-1), q.log_softmax(-1)
    else:
        p, q = _with_rest(p), _with_rest(q)
    return torch.where(empty, 0.0, divergence(p, q, spec))


def sampled_rest(logp: Tensor, logp_teacher: Tensor, listed: Tensor, weight: Tensor) -> Tensor:
    """Estimate [B, T] of the reverse KL's part outside of the teacher's k tokens, from one token.

    logp, logp_teacher [B, T]: of the sampled token. listed [B, T] bool: it is one of the k, so that
    the estimate is 0. weight [B, T]: its ratio p/p_inf, detached, truncated as configured. The mean
    over tokens x of p_inf is `sum over x outside of p log(p/q) - p + q`. The mean gradient is that
    sum's, `sum of p log(p/q) grad log p`. A log difference beyond +-20 is cut.
    """
    return distill_sampled("k3", logp, logp_teacher, ~listed & (weight != 0), weight)


def rest_mass(teacher_at: Tensor, ids: Tensor) -> Tensor:
    """[...]: the teacher's probability outside of its k tokens [..., k]."""
    held = torch.where(ids >= 0, at_least_float32(teacher_at).exp(), 0.0).sum(-1)
    return (1.0 - held).clamp(min=0.0)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """sum of p (log p - log q) over the last dimension; 0 where p is 0."""
    on = torch.isfinite(p)
    safe = torch.where(on, p, 0.0)
    return torch.where(on, safe.exp() * (safe - torch.where(on, q, 0.0)), 0.0).sum(-1)


def _terms(p: Tensor, q: Tensor) -> Tensor:
    """p log(p/q) - p + q of each outcome; 0 where q is 0."""
    on = torch.isfinite(p) & torch.isfinite(q)
    p, q = torch.where(on, p, 0.0), torch.where(on, q, 0.0)
    return torch.where(on, p.exp() * (p - q - 1.0) + q.exp(), 0.0)


def _with_rest(logp: Tensor) -> Tensor:
    """Log-probs [..., k + 1]: of the k tokens, and of all others together."""
    rest = (1.0 - logp.exp().sum(-1, keepdim=True)).clamp(min=MIN_TAIL)
    return torch.cat([logp, rest.log()], -1)
