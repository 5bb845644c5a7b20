"""KL(p_new || p_base): estimators on sampled tokens, the full sum over the vocabulary, and entropy."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlcore.errors import UserError

Estimator = Literal["k1", "k2", "k3"]
CLAMP = 20.0  # of log differences before exp


def sampled_kl(kind: Estimator, logp_new: Tensor, logp_base: Tensor, mask: Tensor) -> Tensor:
    """Estimate of KL(p_new || p_base) per token [B,T] float32 from tokens x ~ p_new; 0 where the mask is 0.

    With d = log p_base - log p_new: k1 = -d (unbiased), k2 = d^2/2 (biased, low variance, its gradient is that of the
    KL), k3 = exp(d) - 1 - d (unbiased, never negative). `logp_new` carries the gradient. Raises UserError on the name.
    """
    d = torch.where(mask != 0, logp_base.detach().float() - logp_new.float(), 0.0)
    if kind == "k1":
        return -d
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        d = d.clamp(-CLAMP, CLAMP)
        return torch.expm1(d) - d
    raise UserError.choice("algorithm.kl_estimator", kind, ("k1", "k2", "k3", "full"))


def full_kl(logprobs_new: Tensor, logprobs_base: Tensor) -> Tensor:
    """Exact `sum_x p_new(x) (log p_new(x) - log p_base(x))` [...] float32 over log-probs [...,V].

    Call it on chunks of positions: it holds a few tensors of its inputs' size. Tokens that p_new excludes (-inf) add 0.
    """
    new, base = logprobs_new.float(), logprobs_base.detach().float()
    possible = torch.isfinite(new)
    new = torch.where(possible, new, 0.0)
    base = torch.where(possible, base, 0.0)
    return torch.where(possible, new.exp() * (new - base), 0.0).sum(-1)


def entropy(logprobs: Tensor) -> Tensor:
    """`-sum_x p(x) log p(x)` [...] float32 in nats over log-probs [...,V]; excluded tokens (-inf) add 0."""
    logp = logprobs.float()
    logp = torch.where(torch.isfinite(logp), logp, -1e4)
    return -(logp.exp() * logp).sum(-1)
