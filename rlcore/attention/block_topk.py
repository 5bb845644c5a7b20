"""The selection rule of block top-k attention, as pure functions (DistillSparse, sec. 4; Quest's
family).

A sequence is cut into pages of `block_size` tokens; page j holds positions `j*block_size ..`. A
query at position t sees the causal part of `budget` pages out of its `t // block_size + 1`:

- page 0 and its own page (the one that holds t, complete or not) always;
- of the others those with the highest score: the dot product of the page's mean key with the mean
  query of the KV head's query group. Equal scores go to the older page.

Only complete pages are ever scored: every page before the query's own is complete, and its own is
kept unscored. So a page's summary is computed once, from its `block_size` keys, and chunking,
batching and preemption cannot change it.

Actor and learner must select the same pages from keys that differ in the last bit. Sums here are
trees of element-wise additions, which give the same bits on every device and memory layout, and
ties are broken by index. What remains is the rounding of the two models: pages whose scores agree
to about 1e-6 (relative) may be swapped, for that token and head."""

from __future__ import annotations

import torch

from rlcore.attention.specs import ROUNDING_SLACK, SparseSpec

_HIGH = 2**62  # above every score's sort key


def page_budget(rule: SparseSpec, pages: torch.Tensor) -> torch.Tensor:
    """Pages attended by queries that see `pages` pages: any shape, int64, own page included."""
    if rule.blocks is not None:
        return pages.clamp(max=rule.blocks)
    # in float64, as `SparseSpec.max_budget` computes it
    wanted = torch.ceil(pages.double() * rule.page_share - ROUNDING_SLACK).to(pages.dtype)
    return torch.minimum(pages, wanted.clamp(min=2))


def tree_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over `dim` by halving: the same bits for any device, strides and other sizes."""
    while (n := x.shape[dim]) > 1:
        half = n // 2
        total = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = total if n % 2 == 0 else torch.cat([total, x.narrow(dim, n - 1, 1)], dim)
    return x.squeeze(dim)


def page_summaries(keys: torch.Tensor) -> torch.Tensor:
    """Mean key of complete pages, rounded to the keys' dtype: an engine stores it so.

    keys [..., block_size, D], after RoPE, any float dtype -> [..., D] float32.
    """
    return (tree_sum(keys.float(), -2) / keys.shape[-2]).to(keys.dtype).float()


def group_queries(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Mean query of each KV head's group.

    query [..., H, D], heads of a group adjacent -> [..., kv_heads, D] float32.
    """
    groups = query.float().unflatten(-2, (kv_heads, -1))
    return tree_sum(groups, -2) / groups.shape[-2]


def select_pages(
    scores: torch.Tensor, pages: torch.Tensor, budget: torch.Tensor, width: int
) -> torch.Tensor:
    """The rule: which pages each query attends to.

    scores [..., N] float32, page j's score; those of page 0, of the own page and beyond are
    ignored. pages and budget [...] int64 (broadcastable): pages seen, own included, and pages to
    keep. width: columns of the answer, at least the largest budget. Fixed shapes, no
    synchronisation.

    Returns [..., width] int64: the kept pages in ascending order, then N as padding.
    """
    n = scores.shape[-1]
    page = torch.arange(n, device=scores.device)
    bits = (scores + 0.0).view(torch.int32)  # + 0.0: minus zero ties with zero
    rank = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # integers in the order of the floats
    # keys are unique, so any sort is stable: equal scores go to the older page
    key = (rank << 24) + (n - page)
    own = (pages - 1).unsqueeze(-1)
    key = torch.where((page == 0) | (page == own), _HIGH + n - page, key)
    key = key.masked_fill(page > own, -_HIGH)
    best = key.topk(min(width, n), dim=-1).indices
    if width > n:
        best = torch.nn.functional.pad(best, (0, width - n), value=n)
    place = torch.arange(width, device=scores.device)
    return best.masked_fill(place >= budget.unsqueeze(-1), n).sort(dim=-1).values


def page_mask(selected: torch.Tensor, n: int) -> torch.Tensor:
    """The pages [..., K] of `select_pages`, of n pages, as a mask [..., n] bool."""
    mask = torch.zeros(*selected.shape[:-1], n + 1, dtype=torch.bool, device=selected.device)
    return mask.scatter_(-1, selected, True)[..., :n]
