"""Shapes of a model's weights without its weights: built on torch's meta device, without memory."""

from __future__ import annotations

from typing import Any

from rlcore.weights.experts import single_shapes


def meta_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every weight of the causal LM of a transformers configuration,
    tied ones once, as a model folder names them."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    lm.tie_weights()
    shapes: dict[str, tuple[int, ...]] = {}
    for name, p in lm.named_parameters():
        shapes |= single_shapes(name, tuple(p.shape))
    return shapes
