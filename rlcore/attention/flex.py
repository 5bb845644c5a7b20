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

from rlcore.attention.seen import pages_seen, summaries_of
from rlcore.attention.specs import SparseSpec

BLOCK = 128  # queries and keys of a block: torch's own size, which its kernels always accept
QUERY_CHUNK = 2048  # queries whose scores exist at one time


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
        _note_blocks(blocks, seen[:, :, a:z], size, a)
    # a dense query may have pages beyond its own
    blocks &= torch.ones(count, count, dtype=torch.bool, device=blocks.device).tril()
    per_head = blocks.repeat_interleave(heads // kv_heads, dim=1).int()
    return BlockMask.from_kv_blocks(
        per_head.sum(-1, dtype=torch.int32),
        per_head.argsort(dim=-1, descending=True, stable=True).int(),
        BLOCK_SIZE=BLOCK,
        mask_mod=_looked_up(seen, bounds, size, heads // kv_heads),
        seq_lengths=(t, t),
    )


def _note_blocks(blocks: Tensor, seen: Tensor, size: int, start: int) -> None:
    """Mark the blocks of keys that hold a part of the pages which a block of queries sees.

    seen [B, Hk, queries, pages]: of the sequence whose first token is row and column `start`.
    """
    length = seen.shape[2]
    before = start % BLOCK  # rows of the first block that are another sequence's
    padded = F.pad(seen, (0, 0, before, -(before + length) % BLOCK))
    of_block = padded.unflatten(2, (-1, BLOCK)).any(3)[..., : -(-length // size)].int()
    begin = start + size * torch.arange(of_block.shape[-1], device=seen.device)
    top, counts = start // BLOCK, torch.zeros_like(blocks, dtype=torch.int32)
    rows = counts[:, :, top : top + of_block.shape[2]]
    for offset in (*range(0, size, BLOCK), size - 1):  # a page may reach into further blocks
        column = (begin + offset).clamp(max=start + length - 1) // BLOCK
        rows.index_add_(3, column, of_block)
    blocks |= counts > 0


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
