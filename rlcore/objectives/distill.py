"""DistillSparse: reverse KL of the sparse actor's policy to the dense policy, on the actor's own samples.

DistillSparse, algorithm 1 step 7: with theta frozen, phi steps on `L_PPO_sparse + lambda * KL(sparse || dense)`. Here
p_s is the sparse policy (theta + phi, which carries the gradient) and p_d the dense one (theta, detached: the log-probs
of step 4). Every function gives the KL of the next token at the states the actor visited, one value per token.

The gradient is the reverse KL's for each estimator, which takes care for the sampled ones: differentiating the k1
value gives zero on average, differentiating the k3 value the gradient of the forward KL. So sampled estimators carry
`(log p_s - log p_d) * grad log p_s`, whose average over tokens drawn from p_s is the gradient of the KL.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlcore.errors import UserError
from rlcore.objectives.kl import full_kl, sampled_kl

DistillKl = Literal["k1", "k3", "topk", "full"]
MIN_TAIL = 1e-6  # mass below which the tail is rounding noise


def distill_sampled(
    kind: Literal["k1", "k3"], logp_sparse: Tensor, logp_dense: Tensor, mask: Tensor, weight: Tensor | None = None
) -> Tensor:
    """KL(p_s || p_d) per token [B,T] float32 from the sampled tokens; 0 where the mask is 0.

    The value is the k1 or k3 estimate (see `rlcore.objectives.kl`); both have the same gradient. All tensors [B,T];
    weight: detached ratio p_s/p_inf, truncated as the run has it, when the samples are older than phi; None is 1.
    Raises UserError on another name.
    """
    if kind not in ("k1", "k3"):
        raise UserError.choice("correction.distill.kl", kind, ("k1", "k3", "topk", "full"))
    value = sampled_kl(kind, logp_sparse, logp_dense, mask).detach()
    logp = torch.where(mask != 0, logp_sparse.float(), 0.0)
    score = torch.where(mask != 0, (logp_sparse - logp_dense).detach().float(), 0.0) * logp
    kl = value + score - score.detach()
    return kl if weight is None else torch.where(mask != 0, weight.detach().float(), 0.0) * kl


def distill_topk(logp_sparse_at: Tensor, logp_dense_at: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """KL(p_s || p_d) per token [B,T] float32 over k tokens and one bin for all others; 0 where the mask is 0.

    logp_sparse_at and logp_dense_at [B,T,k] are both models' log-probs of the tokens `ids` [B,T,k] (the actor's stored
    top k; -1 pads). Never above the full KL, equal to it when the ids are the whole vocabulary or nothing is elsewhere.
    """
    known = (ids >= 0) & (mask != 0).unsqueeze(-1) & torch.isfinite(logp_sparse_at) & torch.isfinite(logp_dense_at)
    sparse = torch.where(known, logp_sparse_at.float(), 0.0)
    dense = torch.where(known, logp_dense_at.detach().float(), 0.0)
    p_sparse, p_dense = (torch.where(known, x.exp(), 0.0) for x in (sparse, dense))
    inside = (p_sparse * (sparse - dense)).sum(-1)
    rest_sparse, rest_dense = 1 - p_sparse.sum(-1), 1 - p_dense.sum(-1)
    tail = rest_sparse.clamp(min=MIN_TAIL) * (rest_sparse.clamp(min=MIN_TAIL) / rest_dense.clamp(min=MIN_TAIL)).log()
    return torch.where(mask != 0, inside + tail, 0.0)


def distill_full(logits_sparse: Tensor, logits_dense: Tensor, mask: Tensor) -> Tensor:
    """Exact KL(p_s || p_d) per token [...] float32 over logits [...,V]; 0 where mask [...] is 0.

    Logits are those the policies sample with (divided by the temperature). Call it on chunks of positions.
    """
    sparse = logits_sparse.float().log_softmax(-1)
    dense = logits_dense.detach().float().log_softmax(-1)
    return torch.where(mask != 0, full_kl(sparse, dense), 0.0)
