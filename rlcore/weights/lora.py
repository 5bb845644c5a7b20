"""Merging LoRA factors into base weights: what an actor serves is one plain set of tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def merge_lora(
    base: Mapping[str, torch.Tensor],
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    *,
    scale: float,
) -> dict[str, torch.Tensor]:
    """W + scale * B @ A for every adapted weight; the others are the same objects.

    `base`: Hugging Face names. `factors`: base name -> (A [r, in], B [out, r]). `scale` is alpha / r.
    The product is taken in float32 and the sum rounded once to the weight's dtype. Raises ValueError for a factor
    whose weight is missing or whose shape does not fit.
    """
    merged = dict(base)
    for name, (a, b) in factors.items():
        if name not in base:
            raise ValueError(f"LoRA factors for {name}, which is not among the base weights")
        weight = base[name]
        if (b.shape[0], a.shape[1]) != tuple(weight.shape) or a.shape[0] != b.shape[1]:
            raise ValueError(f"LoRA factors of {name}: A {tuple(a.shape)}, B {tuple(b.shape)}, W {tuple(weight.shape)}")
        delta = b.detach().float() @ a.detach().float()
        merged[name] = (weight.detach().float() + scale * delta).to(weight.dtype)
    return merged
