"""Causal attention, dense or by pages, over sequences that share the positions of their common
prefixes, as an attention implementation of transformers.

The positions of a forward are the nodes of a tree, in one row: every layer but attention computes
each of them once. A query attends to its node's path from the root. Attention takes the rows apart
again. The queries of a row are the nodes that it adds to the tree; its keys are its whole path,
gathered. So the keys of a shared node receive the gradients of all rows that read them.

Prepare the model with `accept(lm)`; a forward without `shared_prefix` is then as before:

    model(input_ids=ids, position_ids=depths, attention_mask=NO_MASK, use_cache=False,
          shared_prefix=SharedRows.of(rows, nodes).ready(dtype))

`SharedRows.by(rule)` in place of `ready` attends by the rule of block top-k attention. A gathered
path has its sequence's pages, in order, so that each query selects among its own sequence's pages.

`SharedTree` of `shared_tree.py` reads the same rows on GPUs.

As an argument of the forward, the rows reach a forward that gradient checkpointing repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from rlcore.attention.specs import SparseSpec

_SLACK = 32  # rows whose lengths differ by no more are padded to one block


@dataclass(frozen=True, slots=True)
class TreeRow:
    """One sequence in the tree.

    Example, a sequence of 5 positions of which the first 3 are another's: TreeRow([0, 1, 2, 8, 9],
    3)
    """

    path: np.ndarray  # [L] int64, the node of each position
    first: int  # the nodes from this position on are this row's own: its queries


class SharedNodes(Protocol):
    """`SharedRows`, or `SharedTree` on GPUs."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of like size, padded: S rows of K keys and Q queries.

    The queries of a square block are all its positions, and attend as in a plain forward; only the
    rows' own nodes are read. Another block has the own ones alone, under a mask.
    """

    keys: Tensor  # [S, K] int64, nodes
    queries: Tensor | None  # [S, Q] int64, nodes; None: square
    first: Tensor  # [S] int64, position of each row's first own node
    bias: Tensor | None = None  # [S, 1, Q, K], added to the scores; made by `ready`

    def ready(self, dtype: torch.dtype) -> Block:
        """With the mask of a forward."""
        if self.queries is None:
            return self
        (_, width), length = self.queries.shape, self.keys.shape[1]
        device = self.keys.device
        position = self.first[:, None] + torch.arange(width, device=device)
        seen = torch.arange(length, device=device) <= position[:, :, None]
        bias = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)
        return replace(self, bias=bias[:, None])


@dataclass(frozen=True, slots=True)
class SharedRows:
    """How attention reads the nodes of a forward."""

    blocks: tuple[Block, ...]
    places: Tensor  # [U] int64: each node's query among those of all blocks, flattened
    rule: SparseSpec | None = None  # which pages queries attend to; None: all

    @classmethod
    def of(cls, rows: Sequence[TreeRow], nodes: int, device: torch.device | str = "cpu") -> Self:
        """From rows that own each of `nodes` nodes once."""
        places = np.empty(nodes, dtype=np.int64)
        blocks, start = [], 0
        for shape in blocks_of([(len(r.path), len(r.path) - r.first) for r in rows]):
            chosen = [rows[i] for i in shape.rows]
            for row in chosen:
                own = row.path[row.first :]
                at = start + (row.first if shape.square else 0)
                places[own] = np.arange(at, at + len(own))
                start += shape.queries
            blocks.append(_padded(chosen, shape, device))
        return cls(tuple(blocks), torch.from_numpy(places).to(device))

    def ready(self, dtype: torch.dtype) -> SharedRows:
        """With the masks that a dense forward in `dtype` needs."""
        return replace(self, blocks=tuple(block.ready(dtype) for block in self.blocks))

    def by(self, rule: SparseSpec) -> SharedRows:
        """For a sparse forward, which makes its masks in every layer."""
        if rule.needs_prompts:
            raise ValueError(
                f"prompt={rule.prompt}: a node does not say where its sequence's prompt ends"
            )
        return replace(self, rule=rule)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
        """q [1, H, U, D], k and v [1, Hk, U, D] -> [1, U, H, D]."""
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [U, H, D]
        rule = self.rule
        outputs = [
            _block(block, q, k, v, scaling)
            if rule is None
            else _paged(block, (q, k, v), rule, scaling)
            for block in self.blocks
        ]
        whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return whole.index_select(0, self.places).unsqueeze(0)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The rows of a block, by index, padded to `keys` and `queries`."""

    rows: tuple[int, ...]
    keys: int
    queries: int
    square: bool

    @property
    def scores(self) -> int:
        """Pairs of query and key that are computed."""
        pairs = self.queries * self.keys
        return len(self.rows) * (pairs // 2 if self.square else pairs)


def blocks_of(sizes: Sequence[tuple[int, int]]) -> list[BlockShape]:
    """Blocks for rows of (keys, own queries), rows without queries left out.

    Causal attention over all of a row's positions costs half a square, so the rows whose own nodes
    are the larger part are computed as squares.
    """
    blocks = []
    for square in (True, False):
        chosen = [i for i, (k, q) in enumerate(sizes) if q and (2 * q >= k) == square]
        chosen.sort(key=lambda i: (-sizes[i][0], i))
        while chosen:
            keys = sizes[chosen[0]][0]
            least = keys - max(_SLACK, keys // 4)
            end = next((n for n, i in enumerate(chosen) if sizes[i][0] < least), len(chosen))
            rows, chosen = tuple(chosen[:end]), chosen[end:]
            queries = keys if square else max(sizes[i][1] for i in rows)
            blocks.append(BlockShape(rows, keys, queries, square))
    return blocks


def _padded(rows: Sequence[TreeRow], shape: BlockShape, device: torch.device | str) -> Block:
    """Padding repeats node 0: no query that is read attends to it, and its own outputs are not
    read."""
    keys = np.zeros((len(rows), shape.keys), dtype=np.int64)
    queries = np.zeros((len(rows), shape.queries), dtype=np.int64)
    for i, row in enumerate(rows):
        keys[i, : len(row.path)] = row.path
        own = row.path[row.first :]
        queries[i, : len(own)] = own
    first = np.array([row.first for row in rows], dtype=np.int64)
    keys_, queries_, first_ = (torch.from_numpy(a).to(device) for a in (keys, queries, first))
    return Block(keys_, None if shape.square else queries_, first_)


#: before the name of the implementation that a model was loaded with
SHARED_PREFIX = "shared_prefix_"
#: transformers uses a mask of four dimensions as it is, and makes none of its own
NO_MASK = torch.zeros(1, 1, 1, 1)
# what changes attention in ways that these rows do not follow; most models pass None
_ODD = ("sliding_window", "softcap", "s_aux", "position_bias", "cache")


def accept(lm: Any) -> None:
    """Let a model that was loaded with SDPA, block top-k attention on top of it, or torch's
    variable-length kernel take `shared_prefix`, in place.

    Without it, every forward is as before.
    """
    before = lm.config.get_text_config()._attn_implementation
    name = SHARED_PREFIX + before

    def attend(*given: Any, shared_prefix: SharedNodes | None = None, **kwargs: Any) -> Any:
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
    shared_prefix: SharedNodes,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, H, U, D], key and value [1, Hk, U, D] -> [1, U, H, D]."""
    odd = [name for name in _ODD if kwargs.get(name) is not None]
    odd += ["dropout"] if kwargs.get("dropout") else []
    if odd or kwargs.get("is_causal") is False:
        what = (odd or ["attention forward"])[0]
        raise UnsharedAttentionError(f"attention over shared prefixes computes no {what}")
    return shared_prefix.attend(query, key, value, scaling), None


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
    """Attention of a block by the rule of block top-k attention; in chunks of queries so that masks
    stay small."""
    from rlcore.attention.implementation import (
        QUERY_CHUNK,
        SparseRows,
        attend_groups,
        attend_rows,
        seen_from,
        summaries_of,
    )

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
    rows = _RepeatedRows.apply(x.flatten(1), nodes.flatten())
    return rows.view(*nodes.shape, *x.shape[1:]).transpose(1, 2)


class _RepeatedRows(torch.autograd.Function):
    """Rows of a matrix, repeated. Gradients of a row are summed in at least float32: all responses
    of a group add up in the prompt's keys."""

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
