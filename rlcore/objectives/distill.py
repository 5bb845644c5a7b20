"""DistillSparse: reverse KL of the sparse actor's policy to the dense policy, on the actor's own
samples.

DistillSparse, algorithm 1 step 7: with theta frozen, phi steps on `L_PPO_sparse + lambda *
KL(sparse || dense)`. Here p_s is the sparse policy (theta + phi, which carries the gradient) and
p_d the dense one (theta, detached: the log-probs of step 4). Every function gives the KL of the
next token at the states the actor visited, one value per token.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlcore.objectives.kl import sampled_kl

MIN_TAIL = 1e-6  # mass below which the tail is rounding noise


def distill_sampled(
    kind: Literal["k1", "k3"],
    logp_sparse: Tensor,
    logp_dense: Tensor,
    mask: Tensor,
    weight: Tensor | None = None,
) -> Tensor:
    """KL(p_s || p_d) per token [B, T] float32 from the sampled tokens; 0 where the mask is 0.

    The value is the k1 or k3 estimate (see `rlcore.objectives.kl`), the gradient that of the
    reverse KL for both. All tensors [B, T]; weight: detached ratio p_s/p_inf, truncated as
    configured, when the samples are older than phi; None is 1."""
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
