"""A decoder of vLLM on the CPU that computes to the bit what a learner computes
(`attention/bitwise.py`).

vLLM schedules, keeps blocks and samples as ever; what runs between the ids of a step and its
log-probs is replaced: norms, products, rotation, attention and the softmax of logits. Keys and
values are held in addition to vLLM's own, a row for each of its slots, since its kernels lay theirs
out for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from rlcore.attention.bitwise import (
    WIDTHS,
    attend,
    linear,
    log_probs,
    machine_reason,
    padded_length,
    rotated,
)
from rlcore.errors import UserError
from rlcore.rollout.engines.vllm.cpu.decoder import PlainDecoder
from rlcore.rollout.engines.vllm.cpu.quick_steps import SeededDraws
from rlcore.rollout.engines.vllm.patches import DRAWS, LOGITS

_TOKENS = 64  # that attend together: each gathers the keys and values of a whole sequence


class BitwiseDraws(SeededDraws):
    """Seeded draws whose log-probs are computed as the learner's."""

    def sample(
        self,
        logits: Tensor,
        generators: Mapping[int, torch.Generator],
        k: Tensor | None,
        p: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if k is not None or p is not None:
            raise RuntimeError("bitwise=true samples from whole distributions")
        logits = logits.float()
        tokens = torch.ops._C.fused_gumbel_argmax(logits, self.seeds(generators, len(logits)))
        return tokens, log_probs(logits)


class _Norm:
    """Root mean square norm, in the operations of transformers in their order."""

    def __init__(self, module: Any) -> None:
        self.weight, self.eps = module.weight.data, module.variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = rows * rows
        scale = out.mean(1, keepdim=True).add_(self.eps).rsqrt_()
        return torch.mul(rows, scale, out=out).mul_(self.weight).view(x.shape)


class _Linear:
    def __init__(self, module: Any) -> None:
        self.weight = module.weight.data
        self.bias = None if module.bias is None else module.bias.data

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class _Step:
    """Where the tokens of a step stand."""

    def __init__(self, positions: Tensor, its: Any, size: int, length: int) -> None:
        """`its`: vLLM's metadata of the step; `size`: slots of a block."""
        lens = its.query_start_loc.diff().long()
        request = torch.repeat_interleave(torch.arange(len(lens)), lens)
        at = torch.arange(length)
        # [n, length]: the slot of each position of a token's sequence; a later one's is not read
        blocks = its.block_table[request][:, (at // size).clamp(max=its.block_table.shape[1] - 1)]
        self.allowed = at <= positions[:, None]
        self.slots = torch.where(self.allowed, blocks.long() * size + at % size, 0)
        self.stored = its.slot_mapping.long()
        self.positions, self.its = positions, its


class _Layer:
    """One decoder layer of vLLM."""

    def __init__(self, module: Any, length: int) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.before = _Norm(module.input_layernorm)
        self.after = _Norm(module.post_attention_layernorm)
        self.qkv, self.out = _Linear(attention.qkv_proj), _Linear(attention.o_proj)
        self.gate_up, self.down = _Linear(mlp.gate_up_proj), _Linear(mlp.down_proj)
        normed = hasattr(attention, "q_norm")
        self.q_norm = _Norm(attention.q_norm) if normed else None
        self.k_norm = _Norm(attention.k_norm) if normed else None
        self.sizes = [attention.q_size, attention.kv_size, attention.kv_size]
        self.attention: Any = attention.attn
        self.length = length
        self.keys = self.values = torch.empty(0)  # [slots, kv heads, head dim]

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, step: _Step) -> Tensor:
        """hidden [n, D] -> the same, after the layer."""
        hidden = hidden + self.out(self._attended(self.qkv(self.before(hidden)), cos, sin, step))
        gate, up = self.gate_up(self.after(hidden)).chunk(2, dim=-1)
        return hidden + self.down(F.silu(gate.contiguous()) * up)

    def _attended(self, qkv: Tensor, cos: Tensor, sin: Tensor, step: _Step) -> Tensor:
        size, n = self.attention.impl.head_size, len(qkv)
        q, k, v = (part.reshape(n, -1, size) for part in qkv.split(self.sizes, dim=-1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotated(x, cos[:, None], sin[:, None]) for x in (q, k))
        self._allocate(k)
        self.keys[step.stored], self.values[step.stored] = k, v
        return torch.cat([self._rows(q, step, s) for s in _parts(n)]).flatten(1)

    def _rows(self, q: Tensor, step: _Step, part: slice) -> Tensor:
        """[m, heads, size] of some tokens. Query heads that share keys are rows of a product."""
        heads, size = self.keys.shape[1:]
        own = q[part]
        k, v = (
            held[step.slots[part]].transpose(1, 2).reshape(-1, self.length, size)
            for held in (self.keys, self.values)
        )
        grouped = own.reshape(len(own) * heads, -1, size)
        allowed = step.allowed[part].repeat_interleave(heads, 0)[:, None]
        out = attend(grouped, k, v, allowed, self.attention.impl.scale)
        return out.reshape(own.shape)

    def _allocate(self, k: Tensor) -> None:
        blocks, _, block, _ = self.attention.kv_cache.shape
        if len(self.keys) != blocks * block:
            self.keys = torch.zeros(blocks * block, *k.shape[1:])
            self.values = torch.zeros_like(self.keys)


def _parts(n: int) -> list[slice]:
    return [slice(start, start + _TOKENS) for start in range(0, n, _TOKENS)]


class BitwiseDecoder(PlainDecoder):
    """A model runner's forward pass and logits. It stays as it was where `reason` says why."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        if self.reason is not None:
            return
        model = runner.model.model
        length = padded_length(runner.max_model_len)
        self.reason = _unsuited(model)
        self._length = length
        self._exact = [_Layer(layer, length) for layer in model.layers]
        self._last = _Norm(model.norm)
        rotary = model.layers[0].self_attn.rotary_emb
        cos, sin = rotary.cos_sin_cache.float().chunk(2, dim=-1)
        self._cos, self._sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        processor = runner.model.logits_processor
        head = runner.model.lm_head.weight.data[: processor.org_vocab_size]
        LOGITS.replace(lambda _, hidden, *more: linear(hidden, head), of=processor)

    def states(self, input_ids: Tensor, positions: Tensor, its: Any) -> Tensor:
        hidden: Tensor = F.embedding(input_ids, self._embedding)
        size = self._exact[0].attention.kv_cache.shape[2]
        step = _Step(positions, its, size, self._length)
        cos, sin = self._cos[positions], self._sin[positions]
        for layer in self._exact:
            hidden = layer(hidden, cos, sin, step)
        return self._last(hidden)


def _unsuited(model: Any) -> str | None:
    """Why a model cannot be computed to the bit; None: it can."""
    rotary = model.layers[0].self_attn.rotary_emb
    if not rotary.is_neox_style or rotary.rotary_dim != rotary.head_size:
        return "it rotates other parts of its heads"
    mlp = model.layers[0].mlp
    width = mlp.down_proj.weight.shape[1]
    if width % WIDTHS:
        return f"the width of its MLP, {width}, is not a multiple of {WIDTHS}"
    return None


def install(runner: Any) -> None:
    """Have a model runner compute to the bit. Raises UserError where it cannot."""
    decoder = BitwiseDecoder(runner)
    sampler = runner.sampler.topk_topp_sampler
    own = getattr(sampler.forward, "__func__", None) is TopKTopPSampler.forward_cpu
    reason = decoder.reason or machine_reason()
    if reason is None and not (own and sampler.logprobs_mode == "processed_logprobs"):
        reason = "vLLM samples in another way here"
    if reason is not None:
        raise UserError(f"bitwise=true cannot be had of this engine: {reason}; leave it false.")
    DRAWS.replace(BitwiseDraws(runner).sample, of=sampler)
    runner.rl_decoder = decoder
