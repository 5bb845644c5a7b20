"""Runs the layers of a plain decoder on the CPU without vLLM's modules.

With a small model most of a decode step is not arithmetic but the overhead of vLLM's modules around
each operation. That is custom operations that look their layer up again, calls of modules,
parameters whose class intercepts every operation. Here a model's weights and sizes are read once,
and a step calls the same kernels in the same order, so that its values are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from rlcore.rollout.engines.vllm.patches import MODEL_FORWARD, NORM, is_second

_WIDTH = 16  # values that the kernels take at a time


def norm_kernels() -> AbstractContextManager[None]:
    """Have every RMSNorm that is built inside use vLLM's kernels where they can: a third of the
    time of five operations of torch, equal to rounding."""
    return NORM.replaced(_forward)


def takes(norm: Any, dtype: torch.dtype) -> bool:
    """Return whether the kernels compute this RMSNorm on values of a dtype."""
    plain = norm.pass_weight and norm.pass_weight_add and norm.variance_size_override is None
    return plain and norm.weight.dtype == dtype and norm.weight.shape[-1] % _WIDTH == 0


def _forward(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    """x [..., D] normalised; with a residual, (their sum normalised, their sum)."""
    if not takes(self, x.dtype):
        return self.forward_native(x, residual)
    weight = self.weight.data
    if residual is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.ops._C.rms_norm(out, x.contiguous(), weight, self.variance_epsilon)
        return out
    if not (x.is_contiguous() and residual.is_contiguous()):
        return self.forward_native(x, residual)
    # in place, as vLLM's models allow: neither is read again
    torch.ops._C.fused_add_rms_norm(x, residual, weight, self.variance_epsilon)
    return x, residual


# norm, attention, norm, gated MLP, with residuals between
_LAYERS = ("Qwen3DecoderLayer", "Qwen2DecoderLayer", "LlamaDecoderLayer")
_MODELS = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")


@dataclass(frozen=True, slots=True)
class Linear:
    """x [n, in] -> [n, out]."""

    weight: Tensor  # [out, in], the parameter's own memory
    bias: Tensor | None

    @classmethod
    def of(cls, module: Any) -> Linear:
        return cls(module.weight.data, None if module.bias is None else module.bias.data)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm."""

    weight: Tensor  # [D], the parameter's own memory
    eps: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        return cls(module.weight.data, module.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] -> the same shape."""
        x = x.contiguous()  # the kernel reads it as if it were
        out = torch.empty_like(x)
        torch.ops._C.rms_norm.default(out, x, self.weight, self.eps)
        return out

    def add(self, x: Tensor, residual: Tensor) -> None:
        """In place: residual becomes their sum, x that sum's norm."""
        torch.ops._C.fused_add_rms_norm.default(x, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values of one layer."""

    keys: Tensor  # [blocks, kv heads, block size, head dim]
    values: Tensor

    @classmethod
    def of(cls, attention: Any) -> Cache:
        """Divide a cache as vLLM's backend does."""
        whole = attention.kv_cache
        blocks, heads, size, _ = whole.shape
        return cls(*whole.view(blocks, heads, size * 2, -1).chunk(2, dim=2))


class Layer:
    """One decoder layer of vLLM."""

    def __init__(self, module: Any) -> None:
        attention, mlp = module.self_attn, module.mlp
        self._before = Norm.of(module.input_layernorm)
        self._after = Norm.of(module.post_attention_layernorm)
        self._qkv, self._out = Linear.of(attention.qkv_proj), Linear.of(attention.o_proj)
        self._gate_up, self._down = Linear.of(mlp.gate_up_proj), Linear.of(mlp.down_proj)
        normed = hasattr(attention, "q_norm")
        self._q_norm = Norm.of(attention.q_norm) if normed else None
        self._k_norm = Norm.of(attention.k_norm) if normed else None
        self._sizes = [attention.q_size, attention.kv_size, attention.kv_size]
        self._rotary = attention.rotary_emb
        self._attention: Any = attention.attn
        self._held: Tensor | None = None  # what `_cache` was made of
        self._cache: Cache

    def __call__(self, hidden: Tensor, residual: Tensor | None, positions: Tensor, its: Any) -> Any:
        """hidden [n, D] and the residual before it (none: the first layer) -> the same, after."""
        if residual is None:
            residual, hidden = hidden, self._before(hidden)
        else:
            self._before.add(hidden, residual)
        hidden = self._out(self._attended(self._qkv(hidden), positions, its))
        self._after.add(hidden, residual)
        gate, up = self._gate_up(hidden).chunk(2, dim=-1)
        return self._down(F.silu(gate).mul_(up)), residual

    def _attended(self, qkv: Tensor, positions: Tensor, its: Any) -> Tensor:
        """[n, query heads * head dim]; stores keys and values. `its`: the step's metadata."""
        attention = self._attention
        impl = attention.impl
        size, n = impl.head_size, len(qkv)
        q, k, v = qkv.split(self._sizes, dim=-1)
        if self._q_norm is not None and self._k_norm is not None:
            q = self._q_norm(q.view(n, -1, size)).view(n, -1)
            k = self._k_norm(k.view(n, -1, size)).view(n, -1)
        rotary = self._rotary
        tables = rotary._match_cos_sin_cache_dtype(q)
        ops = torch.ops._C
        ops.rotary_embedding.default(positions, q, k, size, tables, rotary.is_neox_style)
        if self._held is not attention.kv_cache:
            self._held, self._cache = attention.kv_cache, Cache.of(attention)
        keys, values = self._cache.keys, self._cache.values
        scales = attention._k_scale_float, attention._v_scale_float, impl.kv_cache_dtype
        ops.cpu_attn_reshape_and_cache.default(
            k.view(n, -1, size),
            v.view(n, -1, size),
            keys,
            values,
            its.slot_mapping,
            attention.isa,
            *scales,
        )
        out = torch.empty(n, self._sizes[0], dtype=q.dtype)
        ops.cpu_attention_with_kv_cache.default(
            q.view(n, -1, size),
            keys,
            values,
            out.view(n, -1, size),
            its.query_start_loc,
            its.seq_lens,
            impl.scale,
            its.causal,
            impl.alibi_slopes,
            impl.sliding_window,
            its.block_table,
            impl.logits_soft_cap,
            its.scheduler_metadata,
            impl.sinks,
            its.dynamic_causal,
            *scales,
        )
        return out


class PlainDecoder:
    """Replaces a model runner's forward pass, unless `reason` says why it cannot."""

    def __init__(self, runner: Any) -> None:
        self.reason = _unsuited(runner)
        if self.reason is not None:
            return
        model = runner.model.model
        self._embedding: Tensor = model.embed_tokens.weight.data
        self._layers = [Layer(layer) for layer in model.layers]
        self._norm = Norm.of(model.norm)
        self._name: str = model.layers[0].self_attn.attn.layer_name
        self._forward: Callable[..., Any] = MODEL_FORWARD.replace(
            lambda *a, **k: self.run(*a, **k), of=runner
        )

    def run(self, input_ids: Tensor, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The runner's forward pass over n positions: [n, D]."""
        metadata = get_forward_context().attn_metadata
        its: Any = metadata.get(self._name) if isinstance(metadata, dict) else None
        # other steps: without attention, or with positions that requests share
        if its is None or its.num_actual_tokens != len(input_ids):
            return self._forward(input_ids, positions, *args, **kwargs)
        return self.states(input_ids, positions, its)

    def states(self, input_ids: Tensor, positions: Tensor, its: Any) -> Tensor:
        """[n, D], for the ids and the positions of n tokens and vLLM's metadata of attention."""
        hidden: Tensor = F.embedding(input_ids, self._embedding)
        residual: Any = None
        for layer in self._layers:
            hidden, residual = layer(hidden, residual, positions, its)
        self._norm.add(hidden, residual)
        return hidden


def _unsuited(runner: Any) -> str | None:
    """Why a runner's model is not run this way; None: it is."""
    if is_second(runner):
        return "the second runner calls the model in other ways"
    if runner.lora_config is not None:
        return "adapters change what layers do"
    name = type(runner.model).__name__
    if name not in _MODELS:
        return f"{name} is not known"
    modules = list(runner.model.model.modules())
    if any(m._forward_pre_hooks for m in modules):
        return "what its linear maps read is rounded"
    return next((f"{type(m).__name__} is another" for m in modules if not _known(m)), None)


def _known(module: Any) -> bool:
    """Return whether `Layer` computes the result of a module; True for modules that only contain
    others."""
    if isinstance(module, LinearBase):
        return type(module.quant_method) is UnquantizedLinearMethod and module.tp_size == 1
    if isinstance(module, RMSNorm):
        return type(module) is RMSNorm and takes(module, module.weight.dtype)
    if isinstance(module, Attention):
        return type(module.impl) is CPUAttentionBackendImpl and module.query_quant is None
    if isinstance(module, CustomOp):
        own = getattr(type(module), "forward_cpu", None)
        return own in (RotaryEmbedding.forward_cpu, SiluAndMul.forward_cpu) or isinstance(
            module, (VocabParallelEmbedding, ApplyRotaryEmb)
        )
    return not type(module).__name__.endswith("DecoderLayer") or type(module).__name__ in _LAYERS
