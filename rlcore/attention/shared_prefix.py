"""Causal attention, dense or by pages, over sequences that share the positions of their common
prefixes, as an attention implementation of transformers.

The positions of a forward are the nodes of a tree, in one row: every layer but attention computes
each of them once. A query attends to its node's path from the root. Attention takes the rows apart
again: the queries of a row are the nodes that it adds to the tree, its keys are its whole path,
gathered, so that the keys of a shared node receive the gradients of all rows that read them.

Prepare the model with `accept(lm)`; a forward without `shared_prefix` is then as before:

    model(input_ids=ids, position_ids=depths, attention_mask=NO_MASK, use_cache=False,
          shared_prefix=SharedRows.of(rows, nodes).ready(dtype))

`SharedRows.by(rule)` in place of `ready` attends by the rule of block top-k attention: a gathered
path has its sequence's pages, in order, so that each query selects among those of its own sequence.

As an argument of the forward, the rows reach a forward that gradient checkpointing repeats.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from rlcore.attention.implementation import SparseRows, attend_groups, attend_rows
from rlcore.attention.seen import QUERY_CHUNK, seen_from, summaries_of
from rlcore.attention.shared_rows import Block, SharedRows
from rlcore.attention.specs import SparseSpec

#: before the name of the implementation that a model was loaded with
SHARED_PREFIX = "shared_prefix_"
#: transformers uses a mask of four dimensions as it is, and makes none of its own
NO_MASK = torch.zeros(1, 1, 1, 1)
# what changes attention in ways that these rows do not follow; most models pass None
_ODD = ("sliding_window", "softcap", "s_aux", "position_bias", "cache")


def accept(lm: Any) -> None:
    """Let a model that was loaded with SDPA, or block top-k attention beside it, take
    `shared_prefix`, in place.

    Without it, every forward is as before.
    """
    before = lm.config.get_text_config()._attn_implementation
    name = SHARED_PREFIX + before

    def attend(*given: Any, shared_prefix: SharedRows | None = None, **kwargs: Any) -> Any:
        if shared_prefix is None:
            return ALL_ATTENTION_FUNCTIONS[before](*given, **kwargs)
        return _attend(*given, shared_prefix=shared_prefix, **kwargs)

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])
    lm.set_attn_implementation(name)


class UnsharedAttentionError(RuntimeError):
    """A model's attention does something that shared rows do not follow."""


# transformers' interface fixes the parameters
def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    shared_prefix: SharedRows,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, H, U, D], key and value [1, Hk, U, D] -> [1, U, H, D]."""
    odd = [name for name in _ODD if kwargs.get(name) is not None]
    odd += ["dropout"] if kwargs.get("dropout") else []
    if odd or kwargs.get("is_causal") is False:
        what = (odd or ["attention forward"])[0]
        raise UnsharedAttentionError(f"attention over shared prefixes computes no {what}")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [U, H, D]
    rule = shared_prefix.rule
    outputs = [
        _block(block, q, k, v, scaling) if rule is None else _paged(block, (q, k, v), rule, scaling)
        for block in shared_prefix.blocks
    ]
    whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return whole.index_select(0, shared_prefix.places).unsqueeze(0), None


def _block(block: Block, q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
    """Outputs [S*Q, H, D] of a block's queries."""
    queries = block.keys if block.queries is None else block.queries
    if block.queries is not None and block.bias is None:
        raise RuntimeError("attention over shared prefixes takes rows that are `ready`")
    out = F.scaled_dot_product_attention(
        _gathered(q, queries),
        _gathered(k, block.keys),
        _gathered(v, block.keys),
        attn_mask=block.bias,
        is_causal=block.bias is None,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1)


def _paged(
    block: Block, qkv: tuple[Tensor, Tensor, Tensor], rule: SparseSpec, scaling: float | None
) -> Tensor:
    """The same by the rule of block top-k attention; in chunks of queries so that masks stay
    small."""
    k, v = (_gathered(x, block.keys) for x in qkv[1:])
    if block.queries is None:
        out = attend_rows(_gathered(qkv[0], block.keys), k, v, SparseRows(rule), scaling)
        return out.transpose(1, 2).flatten(0, 1)
    query = _gathered(qkv[0], block.queries)
    summaries, (width, length) = summaries_of(k, rule.block_size), (query.shape[2], k.shape[2])
    parts = []
    for a in range(0, width, QUERY_CHUNK):
        q = query[:, :, a : a + QUERY_CHUNK]
        position = block.first[:, None] + torch.arange(a, a + q.shape[2], device=q.device)
        mask = seen_from(q, summaries, rule, position, length)
        parts.append(attend_groups(q, k, v, mask, scaling))
    return torch.cat(parts, dim=2).transpose(1, 2).flatten(0, 1)


def _gathered(x: Tensor, nodes: Tensor) -> Tensor:
    """x [U, H, D] at nodes [S, K] -> [S, H, K, D]."""
    rows = _Rows.apply(x.flatten(1), nodes.flatten())
    return rows.view(*nodes.shape, *x.shape[1:]).transpose(1, 2)


class _Rows(torch.autograd.Function):
    """Rows of a matrix, repeated. Gradients of a row are summed in at least float32: those of all
    responses of a group add up in the prompt's keys."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(ctx.shape, dtype=wide, device=grad.device)
        return total.index_add_(0, index, grad.to(wide)).to(grad.dtype), None
