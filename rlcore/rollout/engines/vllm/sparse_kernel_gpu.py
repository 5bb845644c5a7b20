"""Block top-k attention as three Triton kernels. One scores the pages, with programs for each (row,
KV head) and range of pages. One keeps the best of a (row, KV head) and writes their block table.
One summarises the page that a row's token completes, and reads nothing for all other rows.

Under Triton's interpreter they equal `sparse_rows_gpu.kept_blocks` and `summarise_pages`, the
shared rule in plain torch, to the bit; on an H100 the pages kept are the same too. The interpreter
lets a variable change its shape in a loop, which the compiler refuses. triton is imported directly:
vLLM's CPU build puts a placeholder in its place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlcore.attention.kept_pages_gpu import kept_pages
from rlcore.rollout.engines.vllm.sparse_rows_gpu import Rows, summarise_pages

TILE = 32  # pages scored at one time
TILES = 4  # by a program, one after the other


# A Triton kernel takes pointers and sizes one by one.
@triton.jit
def _score_kernel(
    query,
    summaries,
    table,
    pages,
    scores,
    table_stride,
    heads,
    dim,
    max_pages,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """query [n, heads * GROUP, dim], summaries [blocks, heads, dim], table [n, max_pages], pages
    [n] -> scores [n, heads, max_pages] of the pages seen. TILES * TILE of them a program."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    start = tl.program_id(2) * (TILES * TILE)
    seen = tl.load(pages + row).to(tl.int32)
    if start < seen:
        d = tl.arange(0, DIM)
        mean = tl.zeros([DIM], tl.float32)
        for g in tl.static_range(GROUP):
            at = query + ((row * heads + head) * GROUP + g) * dim + d
            mean += tl.load(at, mask=d < dim, other=0.0).to(tl.float32)
        mean = mean / GROUP
        mine = scores + (row * heads + head) * max_pages
        for tile in tl.static_range(TILES):
            page = start + tile * TILE + tl.arange(0, TILE)
            block = tl.load(table + row * table_stride + page, mask=page < seen, other=0)
            there = summaries + (block.to(tl.int64)[:, None] * heads + head) * dim + d[None, :]
            s = tl.load(there, mask=(page < seen)[:, None] & (d < dim)[None, :], other=0.0)
            tl.store(mine + page, tl.sum(s.to(tl.float32) * mean[None, :], 1), mask=page < seen)


# As above.
@triton.jit
def _select_kernel(
    table,
    pages,
    budget,
    scores,
    out,
    table_stride,
    heads,
    max_pages,
    width,
    PAGES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """table [n, max_pages], pages and budget [n], scores [n, heads, max_pages] -> out [n, heads,
    width]."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    seen = tl.load(pages + row).to(tl.int32)
    keep = tl.load(budget + row).to(tl.int32)
    page = tl.arange(0, PAGES)
    scored = (page > 0) & (page < seen - 1)
    score = tl.load(scores + (row * heads + head) * max_pages + page, mask=scored, other=0.0)
    chosen = kept_pages(score, page, seen, keep)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    block = tl.load(table + row * table_stride + page, mask=chosen, other=0)
    answer = out + (row * heads + head) * width
    tl.store(answer + place, block * heads + head, mask=chosen)
    # padding must be a valid index, but is never read: the row's length ends before it
    column = tl.arange(0, WIDTH)
    tl.store(answer + column, head + 0 * column, mask=(column >= keep) & (column < width))


def select_blocks(
    query: torch.Tensor,
    summaries: torch.Tensor,
    block_table: torch.Tensor,
    rows: Rows,
    a: int,
    z: int,
) -> torch.Tensor:
    """As `sparse_rows_gpu.kept_blocks`: query [z - a, H, D], summaries [blocks, kv_heads, D] ->
    [z - a, kv_heads, width] int32. Fixed shapes, nothing from the host."""
    n, all_heads, dim = query.shape
    heads = summaries.shape[1]
    table = block_table[:, : rows.max_pages]
    if rows.requests is not None:
        table = table.index_select(0, rows.requests[a:z])
    max_pages = table.shape[1]
    out = torch.empty(n, heads, rows.width, dtype=torch.int32, device=query.device)
    scores = torch.empty(n, heads, max_pages, device=query.device)
    stride, pages = table.stride(0), rows.pages[a:z]
    _score_kernel[(n, heads, triton.cdiv(max_pages, TILES * TILE))](
        query.contiguous(),
        summaries,
        table,
        pages,
        scores,
        stride,
        heads,
        dim,
        max_pages,
        GROUP=all_heads // heads,
        DIM=triton.next_power_of_2(dim),
        TILE=TILE,
        TILES=TILES,
    )
    _select_kernel[(n, heads)](
        table,
        pages,
        rows.budget[a:z],
        scores,
        out,
        stride,
        heads,
        max_pages,
        rows.width,
        PAGES=triton.next_power_of_2(max_pages),
        WIDTH=triton.next_power_of_2(rows.width),
    )
    return out


# As above.
@triton.jit
def _summarise_kernel(
    keys,
    summaries,
    blocks,
    block_stride,
    head_stride,
    key_stride,
    heads,
    dim,
    SIZE: tl.constexpr,
    HALVINGS: tl.constexpr,
    DIM: tl.constexpr,
):
    """keys [blocks, heads, SIZE, >= dim], blocks [n] -> summaries [blocks, heads, dim] of those
    blocks, 0 left out. SIZE is 2 ** HALVINGS."""
    block = tl.load(blocks + tl.program_id(0)).to(tl.int64)
    head = tl.program_id(1)
    if block > 0:
        d = tl.arange(0, DIM)
        at = keys + block * block_stride + head * head_stride
        at += tl.arange(0, SIZE)[:, None] * key_stride + d[None, :]
        total = tl.load(at, mask=(d < dim)[None, :], other=0.0).to(tl.float32)
        # the order of `block_topk.tree_sum`: the first half plus the second, until one is left
        for i in tl.static_range(HALVINGS):
            total = tl.sum(tl.reshape(total, [2, SIZE >> (i + 1), DIM]), 0)
        mean = tl.reshape(total, [DIM]) / SIZE
        to = summaries + (block * heads + head) * dim + d
        if summaries.dtype.element_ty == tl.bfloat16:
            # To nearest, ties to even, by hand: the interpreter's own cast cuts the bits off.
            bits = mean.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            mean = bits.to(tl.float32, bitcast=True)
        tl.store(to, mean.to(summaries.dtype.element_ty), mask=d < dim)


def summarise_blocks(kv_cache: torch.Tensor, summaries: torch.Tensor, blocks: torch.Tensor) -> None:
    """`sparse_rows_gpu.summarise_pages` of those blocks that are not 0. A page size that is not a
    power of two goes the plain way."""
    size, (_, heads, dim) = kv_cache.shape[2], summaries.shape
    if size & (size - 1):
        summarise_pages(kv_cache, summaries, blocks)
    elif len(blocks):
        _summarise_kernel[(len(blocks), heads)](
            kv_cache,
            summaries,
            blocks,
            *kv_cache.stride()[:3],
            heads,
            dim,
            SIZE=size,
            HALVINGS=size.bit_length() - 1,
            DIM=triton.next_power_of_2(dim),
        )
