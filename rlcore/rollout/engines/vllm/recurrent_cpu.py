"""Models with recurrent layers on the CPU.

Their convolutions' weights stay live, and the gated delta rule takes any dtype. Qwen3.5's text part
does without the library of images that vLLM imports for it.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import (
    causal_conv1d_fn_cpu,
    causal_conv1d_update_cpu,
)
from vllm.model_executor.models import ModelRegistry
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

from rlcore.rollout.engines.vllm.patches import DELTA_RULE, LINEAR_LOADED, ROTATIONS

_TEXT_ONLY = "Qwen3_5ForCausalLM"
_IMAGES = (
    "torchvision.transforms.v2"  # of which transformers' readers of images import `functional`
)


@functools.cache
def install() -> None:
    """Have vLLM's recurrent layers compute right and keep their weights as they were loaded.

    vLLM packs a convolution's weight at the same shape: a weight loaded into the packed one would
    be read wrongly, and a checksum would not show it.
    """
    load = LINEAR_LOADED.find().dispatch_cpu_unquantized_gemm
    rotate = ROTATIONS.find().forward_cpu

    def as_loaded(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            load(layer, remove_weight)

    def rotated(self: Any, positions: Tensor, query: Tensor, *key: Any, **given: Any) -> Any:
        chosen = rotate if query.ndim == 2 else type(self).forward_native
        return chosen(self, positions, query, *key, **given)

    ROTATIONS.replace(rotated)
    LINEAR_LOADED.replace(as_loaded)
    DELTA_RULE.replace(gated_delta_rule)
    ModelRegistry.register_model(_TEXT_ONLY, f"{__name__}:{_TEXT_ONLY}")


def __getattr__(name: str) -> Any:
    """Qwen3.5's class, for which vLLM asks this module."""
    if name != _TEXT_ONLY:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    with _without_images():
        return getattr(importlib.import_module("vllm.model_executor.models.qwen3_5"), name)


@contextmanager
def _without_images() -> Iterator[None]:
    """Let modules import torchvision, whose functions they use for images alone, where it is not
    installed."""
    packages = [_IMAGES.rsplit(".", n)[0] for n in range(3)]
    if importlib.util.find_spec(packages[-1]) is not None:
        yield
        return
    stand_ins = {name: ModuleType(name) for name in packages}
    stand_ins[_IMAGES].functional = None  # type: ignore[attr-defined]
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


def gated_delta_rule(
    mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType
) -> None:
    """vLLM's core of a gated delta net over a step's N positions, which wants bfloat16, as
    transformers computes it: writes `core_attn_out` [N, heads, width].

    mixed_qkv [N, keys, keys and values], b and a [N, heads]. Requests that decode come first, with
    a position each. Updates the convolutions and the states of the requests' slots.
    """
    from transformers.models.qwen3_next import modeling_qwen3_next as rules

    context = get_forward_context()
    if not isinstance(context.attn_metadata, dict):
        return  # a pass that measures memory
    layer: Any = context.no_compile_layers[_resolve_layer_name(layer_name)]
    its: Any = context.attn_metadata[layer.prefix]
    slots, starts = its.non_spec_state_indices_tensor, its.non_spec_query_start_loc
    conv = layer.kv_cache[0] if is_conv_state_dim_first() else layer.kv_cache[0].transpose(1, 2)
    weights = layer.conv1d.weight.squeeze(1), layer.conv1d.bias
    decay = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias)
    gates = torch.stack([decay, b.sigmoid().float()])
    if n := its.num_decodes:
        x = mixed_qkv[:n].contiguous()
        x = causal_conv1d_update_cpu(x, conv, *weights, layer.activation, slots[:n])
        rule = rules.torch_recurrent_gated_delta_rule
        core_attn_out[:n] = _attended(layer, rule, x[:, None], gates[:, :n, None], slots[:n])
    for i in range(n, n + its.num_prefills):
        start, end = starts[i : i + 2].tolist()
        slot, known = slots[i : i + 1], its.has_initial_state[i : i + 1]
        if not known:
            layer.kv_cache[1][slot] = 0
        length, x = torch.tensor([0, end - start]), mixed_qkv[start:end].T
        x = causal_conv1d_fn_cpu(x, *weights, conv, length, slot, known, layer.activation).T
        rule, its_gates = rules.torch_chunk_gated_delta_rule, gates[:, None, start:end]
        core_attn_out[start:end] = _attended(layer, rule, x[None], its_gates, slot)


def _attended(layer: Any, rule: Any, qkv: Tensor, gates: Tensor, slots: Tensor) -> Tensor:
    """A `rule` of transformers over R requests of T positions, [R*T, heads, width], from their
    slots' states, which are updated. qkv [R, T, channels], gates [2, R, T, heads]: decay and
    beta."""
    states = layer.kv_cache[1].transpose(2, 3)  # [slots, heads, width of keys, of values]
    parts = layer.rearrange_mixed_qkv(qkv.flatten(0, 1))
    q, k, v = (x.view(*qkv.shape[:2], *x.shape[2:]) for x in parts)
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    attended, after = rule(
        q,
        k,
        v,
        g=gates[0],
        beta=gates[1],
        initial_state=states[slots],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    states[slots] = after.to(states.dtype)
    return attended.flatten(0, 1)
