"""Selection of block top-k attention as one Triton kernel: a program for each (row, KV head) scores
the pages, keeps the best and writes their block table.

UNPROVEN on GPUs; under Triton's interpreter it equals `sparse_rows_gpu.kept_blocks`, the shared
rule in plain torch. triton is imported directly: vLLM's CPU build puts a placeholder in its place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlcore.rollout.engines.vllm.sparse_rows_gpu import Rows

TILE = 32  # pages scored at one time


# A Triton kernel takes pointers and sizes one by one.
@triton.jit
def _select_kernel(
    query,
    summaries,
    table,
    pages,
    budget,
    scores,
    out,
    table_stride,
    heads,
    dim,
    max_pages,
    width,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """query [n, heads * GROUP, dim], summaries [blocks, heads, dim], table [n, max_pages], pages
    and budget [n], scores [n, heads, max_pages] (scratch) -> out [n, heads, width]."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    seen = tl.load(pages + row).to(tl.int32)
    keep = tl.load(budget + row).to(tl.int32)
    own = seen - 1
    d = tl.arange(0, DIM)
    mean = tl.zeros([DIM], tl.float32)
    for g in tl.static_range(GROUP):
        at = query + ((row * heads + head) * GROUP + g) * dim + d
        mean += tl.load(at, mask=d < dim, other=0.0).to(tl.float32)
    mean = mean / GROUP
    mine = scores + (row * heads + head) * max_pages
    for first in range(0, seen, TILE):
        page = first + tl.arange(0, TILE)
        block = tl.load(table + row * table_stride + page, mask=page < seen, other=0).to(tl.int64)
        at = summaries + (block[:, None] * heads + head) * dim + d[None, :]
        s = tl.load(at, mask=(page < seen)[:, None] & (d < dim)[None, :], other=0.0)
        tl.store(mine + page, tl.sum(s.to(tl.float32) * mean[None, :], 1), mask=page < seen)
    tl.debug_barrier()  # the scores were written by other threads of this program
    page = tl.arange(0, PAGES)
    scored = (page > 0) & (page < own)
    score = tl.load(mine + page, mask=scored, other=0.0) + 0.0  # minus zero ties with zero
    bits = score.to(tl.int32, bitcast=True)
    # integers in the order of the floats
    rank = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    free = keep - tl.minimum(seen, 2)  # page 0 and the own one are kept anyway
    # the largest threshold that at least `free` pages reach
    low = tl.full([], -(1 << 31), tl.int64)
    high = tl.full([], (1 << 31) - 1, tl.int64)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        enough = tl.sum((scored & (rank >= middle)).to(tl.int32), 0) >= free
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    above = scored & (rank > low)
    ties = scored & (rank == low)
    room = free - tl.sum(above.to(tl.int32), 0)
    older = tl.cumsum(ties.to(tl.int32), 0) <= room  # equal scores go to the older page
    chosen = (((above | (ties & older)) & (free > 0)) | (page == 0) | (page == own)) & (page < seen)
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
    _select_kernel[(n, heads)](
        query.contiguous(),
        summaries,
        table,
        rows.pages[a:z],
        rows.budget[a:z],
        scores,
        out,
        table.stride(0),
        heads,
        dim,
        max_pages,
        rows.width,
        GROUP=all_heads // heads,
        DIM=triton.next_power_of_2(dim),
        PAGES=triton.next_power_of_2(max_pages),
        WIDTH=triton.next_power_of_2(rows.width),
        TILE=TILE,
    )
    return out
