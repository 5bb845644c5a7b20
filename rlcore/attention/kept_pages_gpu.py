"""The selection rule of block top-k attention for GPUs, as a part of Triton kernels: which pages
are kept, given their scores. `block_topk.select_pages` is the same rule in plain torch, to the bit.

On CPUs without Triton this module cannot be imported.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def kept_pages(score, page, seen, keep):
    """score and page [PAGES], `seen` pages of which `keep` are kept, own included -> [PAGES] bool.

    The scores of page 0, of the own page and beyond are ignored.
    """
    own = seen - 1
    scored = (page > 0) & (page < own)
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # minus zero ties with zero
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
    return (((above | (ties & older)) & (free > 0)) | (page == 0) | (page == own)) & (page < seen)


# A Triton kernel takes pointers and sizes one by one.
@triton.jit
def _mask_kernel(scores, pages, budget, kept, queries, n, PAGES: tl.constexpr):
    """scores [rows, n], rows ending in `queries`; pages and budget [queries] -> kept [rows, n]."""
    row = tl.program_id(0).to(tl.int64)
    query = row % queries
    seen = tl.load(pages + query).to(tl.int32)
    keep = tl.load(budget + query).to(tl.int32)
    page = tl.arange(0, PAGES)
    score = tl.load(scores + row * n + page, mask=(page > 0) & (page < seen - 1), other=0.0)
    chosen = kept_pages(score, page, seen, keep)
    tl.store(kept + row * n + page, chosen.to(tl.int8), mask=page < n)


def kept_mask(scores: Tensor, pages: Tensor, budget: Tensor) -> Tensor:
    """As `page_mask(select_pages(scores, pages, budget, width), n)` without its sorting.

    scores [..., C, n] float32, pages and budget [C] int64 -> [..., C, n] bool.
    """
    n, rows = scores.shape[-1], scores.shape[:-1].numel()
    kept = torch.empty(scores.shape, dtype=torch.int8, device=scores.device)
    if rows:
        _mask_kernel[(rows,)](
            scores.contiguous(),
            pages.contiguous(),
            budget.contiguous(),
            kept,
            scores.shape[-2],
            n,
            PAGES=triton.next_power_of_2(n),
        )
    return kept.view(torch.bool)
