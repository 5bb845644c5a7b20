"""Layers of a causal LM with other kernels than transformers': on GPUs Liger's norms, MLPs and
rotary embeddings. Linear maps can multiply FP8 numbers, by torchao. Torch can compile norms, MLPs
and FP8 maps."""

from __future__ import annotations

from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.errors import UserError
from rlcore.learner.engines.deepspeed_patches import NORM, ROTARY_LLAMA, ROTARY_QWEN3, SWIGLU
from rlcore.reasons import message_of

# Liger's kernels (package liger-kernel), each of which reads and writes the activations once.
#
# bfloat16 rounds where transformers rounds: in the norm, before the product with the weight.

ROTARY = {"qwen3": ROTARY_QWEN3, "llama": ROTARY_LLAMA}


def liger_layers(lm: nn.Module) -> None:
    """Have the norms and MLPs of a Qwen3 or Llama model use Liger's kernels, in place, and every
    model of its architecture in this process Liger's rotary embedding.

    Raises UserError for a model of another architecture or activation, or without the package.
    """
    config: Any = lm.config.get_text_config()  # type: ignore[union-attr, operator]
    kind, activation = config.model_type, getattr(config, "hidden_act", None)
    if kind not in ROTARY or activation != "silu":
        raise UserError(
            f"learner.layers=liger knows models of {' and '.join(ROTARY)} with SiLU, and this one "
            f"is of {kind} with {activation}: use learner.layers=torch."
        )
    try:
        from liger_kernel.transformers.functional import liger_rope
    except ImportError as e:
        raise UserError(
            f"learner.layers=liger needs the package liger-kernel ({e}): install rlcore[gpu], or "
            "use learner.layers=torch."
        ) from e
    for module in lm.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            NORM.replace(MethodType(_liger_norm, module), of=module)
        elif name.endswith("MLP"):
            SWIGLU.replace(MethodType(_liger_mlp, module), of=module)
    ROTARY[kind].replace(liger_rope)


# Linear maps by torchao's float8 (package torchao): inputs, weights and gradients are rounded to
# E4M3 (gradients with a scale a tensor to E5M2), each scaled to the largest entry of its tensor or
# row, just before each of the three products of a layer; sums and results have the dtype of before.

_RECIPES = {"tensor": "tensorwise", "row": "rowwise"}
_TILE = 16  # GPUs multiply matrices of FP8 numbers whose sides are multiples of it


def float8_layers(lm: nn.Module, scales: str, *, emulate: bool) -> int:
    """Have the linear maps of a causal LM but its head, or of one of its layers, multiply FP8
    numbers, in place; returns how many they are. Parameters keep their names and values.

    `emulate`: the same rounding, and products of the rounded numbers in their own dtype. Raises
    UserError without the package, or for maps whose sides a GPU cannot multiply.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as e:
        raise UserError(
            f"learner.fp8={scales} needs the package torchao ({e}): install rlcore[fp8], or use "
            "learner.fp8=none."
        ) from e
    find: Any = getattr(lm, "get_output_embeddings", None)  # a single layer has none
    head = find() if find is not None else None
    maps = {n: m for n, m in lm.named_modules() if isinstance(m, nn.Linear) and m is not head}
    odd = [n for n, m in maps.items() if m.in_features % _TILE or m.out_features % _TILE]
    if odd or not maps:
        sizes = (
            f"{odd[0]} of {maps[odd[0]].in_features} to {maps[odd[0]].out_features}" if odd else ""
        )
        raise UserError(
            f"learner.fp8={scales} needs linear maps whose sides are multiples of {_TILE}, and the "
            f"model has {sizes or 'none'}: use learner.fp8=none."
        )
    config = Float8LinearConfig.from_recipe_name(_RECIPES[scales])
    # a micro-batch has any number of positions, which one of the products sums over
    config = replace(config, emulate=emulate, pad_inner_dim=not emulate)
    convert_to_float8_training(lm, config=config, module_filter_fn=lambda _, name: name in maps)
    return len(maps)


# What surrounds the products, fused by torch's compiler (inductor), which also rounds to FP8 in the
# same kernels. Attention, hooks of DeepSpeed and checkpoints of activations stay outside.

# One program serves all layers and lengths. It is made anew with and without gradients, for inputs
# of three and four dimensions, and where a dimension is 1.
_PROGRAMS = 32


def compiled_layers(lm: nn.Module, device: torch.device) -> int:
    """Have torch compile the norms and MLPs of a causal LM, or of one of its layers, in place, each
    at its first call. So it does with linear maps of FP8 numbers outside of them. Returns how many
    they are. Parameters keep their names.

    Raises UserError where the compiler does not work on `device`.
    """
    try:
        torch.compile(torch.Tensor.sin, dynamic=True)(torch.zeros(2, device=device))
    except (RuntimeError, ImportError, OSError) as e:
        said = message_of(str(e))
        raise UserError(
            "learner.layers=compiled needs torch's compiler, which fails on this learner's "
            f"{device.type} ({said}): install a C++ compiler (for GPUs, triton), or use "
            "learner.layers=torch."
        ) from e
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, _PROGRAMS)
    within: set[nn.Module] = set()
    found = 0
    for module in lm.modules():  # outer ones first
        name = type(module).__name__
        if module in within or not name.endswith(("RMSNorm", "MLP", "Float8Linear")):
            continue
        within |= {*module.modules()}
        module.compile(dynamic=True)
        found += 1
    return found


def _liger_norm(module: Any, x: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_rms_norm

    # not in place, which would overwrite a gradient that others may read
    out: Tensor = liger_rms_norm(x, module.weight, module.variance_epsilon, in_place=False)
    return out


def _liger_mlp(module: Any, x: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_swiglu

    out: Tensor = module.down_proj(liger_swiglu(module.gate_proj(x), module.up_proj(x)))
    return out
