"""KL of the policy to another one, from hidden states through the LM head, chunk by chunk.

Nothing of size [N, V] survives a chunk: the backward pass recomputes it. Both policies are taken
whole, also under a safe set: constrained to sets that differ, their KL would be infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlcore.learner.head_spec import HeadSpec
from rlcore.objectives.distill import distill_topk
from rlcore.objectives.kl import full_kl


@dataclass(frozen=True, slots=True)
class TopkTarget:
    """A policy known at some tokens only: its log-probs [N, k] float32 at ids [N, k] int64 (-1
    pads)."""

    ids: Tensor
    logp: Tensor


# (hidden states [N, D'], head weight [V, D']) of a whole policy, or some of its log-probs
KlTarget = tuple[Tensor, Tensor] | TopkTarget


def kl_pass(hidden: Tensor, weight: Tensor, target: KlTarget, spec: HeadSpec) -> Tensor:
    """KL(p_new || target) per position [N] float32, at the spec's temperature.

    hidden [N, D] and weight [V, D] are the policy's and carry the gradient.
    """
    if isinstance(target, TopkTarget):
        return topk_kl_pass(hidden, weight, target, spec)
    return full_kl_pass(hidden, weight, target, spec)


def full_kl_pass(
    hidden: Tensor, weight: Tensor, base: tuple[Tensor, Tensor], spec: HeadSpec
) -> Tensor:
    """Exact KL(p_new || p_base) over the vocabulary. base: its hidden states and head weight."""
    weight, w_whole = _as_products_take_it(weight, spec), _as_products_take_it(base[1], spec)

    def chunk(h: Tensor, w: Tensor, h_base: Tensor, w_base: Tensor) -> Tensor:
        new = _log_probs(h, w, spec.temperature)
        return full_kl(new, _log_probs(h_base, w_base, spec.temperature))

    parts = [
        checkpoint(chunk, hidden[s], weight, base[0][s], w_whole, use_reentrant=False)
        for s in spec.slices(len(hidden))
    ]
    return torch.cat(parts)


def topk_kl_pass(hidden: Tensor, weight: Tensor, target: TopkTarget, spec: HeadSpec) -> Tensor:
    """KL(p_new || target) over the target's tokens and one bin for all others."""
    weight = _as_products_take_it(weight, spec)

    def chunk(h: Tensor, w: Tensor, ids: Tensor, logp: Tensor) -> Tensor:
        new = _log_probs(h, w, spec.temperature)
        return distill_topk(new.gather(1, ids.clamp_min(0)), logp, ids, torch.ones_like(ids[:, 0]))

    parts = [
        checkpoint(chunk, hidden[s], weight, target.ids[s], target.logp[s], use_reentrant=False)
        for s in spec.slices(len(hidden))
    ]
    return torch.cat(parts)


def _as_products_take_it(weight: Tensor, spec: HeadSpec) -> Tensor:
    return weight.float() if spec.fp32 else weight


def _log_probs(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = hidden.to(weight.dtype) @ weight.t()
    return torch.log_softmax(logits.float() / temperature, dim=-1)
