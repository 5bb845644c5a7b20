"""Block top-k attention by torch's FlexAttention: blocks of keys that no query of a block sees are
skipped, forward and backward, and no mask over tokens is kept for the backward pass.

For GPUs. On a CPU torch has no compiled backward pass: there masked SDPA attends
(`implementation.py`), which is also what this is tested against, by torch's plain implementation of
the same operator, and on an H100 by its kernel (`benchmarks/results/gpu_h100.md`).

A query's own pages are looked up inside the kernel, since each query has its own and blocks of
queries see the union of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from rlcore.attention.seen import QUERY_CHUNK, pages_seen, summaries_of, tokens_seen
from rlcore.attention.specs import SparseSpec

BLOCK = 128  # queries and keys of a block: torch's own size, which its kernels always accept


def attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: SparseSpec,
    bounds: Sequence[int],
    dense_until: Tensor | None,
    scaling: float | None,
) -> Tensor:
    """Causal block top-k attention, differentiable on GPUs.

    query [B, H, T, D], key and value [B, Hk, T, D] -> [B, H, T, D]. bounds: where the sequences of
    every row begin and end, [0, T] for padded rows; dense_until [B, sequences]: positions below it
    see everything before them.
    """
    mask = make_block_mask(query, key, rule, bounds, dense_until)
    out = _kernel(query.device.type)(
        query, key, value, block_mask=mask, scale=scaling, enable_gqa=query.shape[1] > key.shape[1]
    )
    assert isinstance(out, Tensor)
    return out


@cache
def _kernel(device: str) -> Any:
    """On a GPU one compiled kernel for all layers and shapes."""
    return torch.compile(flex_attention) if device == "cuda" else flex_attention


@torch.no_grad()
def make_block_mask(
    query: Tensor,
    key: Tensor,
    rule: SparseSpec,
    bounds: Sequence[int],
    dense_until: Tensor | None,
) -> BlockMask:
    """What the rule selects, for FlexAttention; the arguments are as of `attend_blocks`."""
    b, heads, t, _ = query.shape
    kv_heads, size = key.shape[1], rule.block_size
    count = -(-t // BLOCK)
    pages = -(-max(z - a for a, z in pairwise(bounds)) // size)
    # as many rows as the blocks have: kernels may look beyond the last query
    seen = query.new_zeros(b, kv_heads, count * BLOCK, pages, dtype=torch.bool)
    blocks = query.new_zeros(b, kv_heads, count, count, dtype=torch.bool)
    for i, (a, z) in enumerate(pairwise(bounds)):
        summaries = summaries_of(key[:, :, a:z], size)
        until = None if dense_until is None else dense_until[:, i]
        for start in range(0, z - a, QUERY_CHUNK):
            first, last = a + start, min(z, a + start + QUERY_CHUNK)
            found = pages_seen(query[:, :, first:last], summaries, rule, start, until)
            seen[:, :, first:last, : found.shape[-1]] = found
            _note_blocks(blocks, tokens_seen(found, size, start), first, a)
    per_head = blocks.repeat_interleave(heads // kv_heads, dim=1).int()
    return BlockMask.from_kv_blocks(
        per_head.sum(-1, dtype=torch.int32),
        per_head.argsort(dim=-1, descending=True, stable=True).int(),
        BLOCK_SIZE=BLOCK,
        mask_mod=_looked_up(seen, bounds, size, heads // kv_heads),
        seq_lengths=(t, t),
    )


def _note_blocks(blocks: Tensor, tokens: Tensor, first_row: int, first_column: int) -> None:
    """Mark the blocks that hold a pair of these tokens [B, Hk, queries, keys], whose first pair is
    at (first_row, first_column)."""
    row, column = first_row % BLOCK, first_column % BLOCK
    rows, columns = row + tokens.shape[-2], column + tokens.shape[-1]
    padded = F.pad(tokens, (column, -columns % BLOCK, row, -rows % BLOCK))
    touched = padded.unflatten(-1, (-1, BLOCK)).any(-1).unflatten(-2, (-1, BLOCK)).any(-2)
    top, left = first_row // BLOCK, first_column // BLOCK
    blocks[:, :, top : top + touched.shape[-2], left : left + touched.shape[-1]] |= touched


def _looked_up(
    seen: Tensor, bounds: Sequence[int], size: int, group: int
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether a query sees a key, of the same sequence and not after it."""
    rows, device = seen.shape[2], seen.device
    starts = torch.tensor(bounds[:-1], device=device)
    columns = torch.arange(rows, device=device)
    sequence = torch.searchsorted(starts, columns, right=True) - 1
    # columns beyond the last token belong to no query
    page = ((columns - starts[sequence]) // size).clamp(max=seen.shape[3] - 1)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = sequence[query] == sequence[key]
        return same & (key <= query) & seen[row, head // group, query, page[key]]

    return sees
