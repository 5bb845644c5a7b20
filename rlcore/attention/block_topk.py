"""The selection rule of block top-k attention, as pure functions (DistillSparse, sec. 4; Quest's family).

A sequence is cut into pages of `block_size` tokens, page j holding positions `j*block_size ..`. A query at position t
sees the causal part of `budget` pages out of its `t // block_size + 1`:

- page 0 and its own page (the one that holds t, complete or not) always;
- of the others the ones with the highest score, the dot product of the page's mean key with the mean query of the KV
  head's query group; equal scores go to the older page.

Only complete pages are ever scored: every page before the query's own is complete, and its own is kept unscored. So a
page's summary is computed once, from its `block_size` keys, and chunking, batching and preemption cannot change it.

Actor and learner must pick the same pages from keys that differ in the last bit. Sums here are trees of element-wise
additions, which give the same bits on every device and memory layout, and ties are broken by index. What remains is the
rounding of the two models: pages whose scores agree to about 1e-6 relative may change places, for that token and head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rlcore.errors import UserError

_HIGH = 2**62  # above every score's sort key
_EVERYWHERE = 2**40  # a position beyond any context


@dataclass(frozen=True, slots=True)
class BlockTopK:
    """Settings of the rule. Exactly one of `blocks` and `share` is given.

    blocks: pages each query attends to, at least 2 (first and own). share: share of the context's pages instead, in
    (0, 1], rounded up, at least 2 pages. sparse_prompt: False lets prompt positions (t < prompt length) attend densely.

    Raises UserError naming the key of `actor.sparse` that is wrong.
    """

    block_size: int = 16
    blocks: int | None = None
    share: float | None = None
    sparse_prompt: bool = True

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise UserError(f"actor.sparse.block_size={self.block_size} must be at least 1.")
        if (self.blocks is None) == (self.share is None):
            raise UserError(
                f"actor.sparse.blocks={self.blocks} and actor.sparse.share={self.share}: give exactly one of the two."
            )
        if self.blocks is not None and self.blocks < 2:
            raise UserError(f"actor.sparse.blocks={self.blocks} must be at least 2: first and own page are kept.")
        if self.share is not None and not 0 < self.share <= 1:
            raise UserError(f"actor.sparse.share={self.share} must lie in (0, 1].")

    def budget(self, pages: torch.Tensor) -> torch.Tensor:
        """Pages attended by queries that see `pages` pages (any shape, int64, own page included)."""
        if self.blocks is not None:
            return pages.clamp(max=self.blocks)
        # float64, and a hair below, so that 0.1 * 30 is 3 pages on every device
        wanted = torch.ceil(pages.double() * self._share - 1e-9).to(pages.dtype)
        return torch.minimum(pages, wanted.clamp(min=2))

    def max_budget(self, pages: int) -> int:
        """The largest budget of any query that sees at most `pages` pages."""
        if self.blocks is not None:
            return min(pages, self.blocks)
        return min(pages, max(2, math.ceil(pages * self._share - 1e-9)))

    @property
    def dense_positions(self) -> int:
        """Positions from the start for which the budget covers every page: there the rule is dense attention."""
        if self.blocks is not None:
            return self.blocks * self.block_size
        if self._share == 1.0:
            return _EVERYWHERE
        pages = 2
        while self.max_budget(pages + 1) > pages:
            pages += 1
        return pages * self.block_size

    @property
    def _share(self) -> float:
        if self.share is None:
            raise RuntimeError("the budget is a number of blocks, not a share")
        return self.share


def tree_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over `dim` by halving: the same bits whatever the device, the strides and the other sizes."""
    while (n := x.shape[dim]) > 1:
        half = n // 2
        total = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = total if n % 2 == 0 else torch.cat([total, x.narrow(dim, n - 1, 1)], dim)
    return x.squeeze(dim)


def page_summaries(keys: torch.Tensor) -> torch.Tensor:
    """Mean key of complete pages. keys [..., block_size, D], after RoPE, any float dtype -> [..., D] float32."""
    return tree_sum(keys.float(), -2) / keys.shape[-2]


def group_queries(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Mean query of each KV head's group. query [..., H, D], a group's heads adjacent -> [..., kv_heads, D] float32."""
    groups = query.float().unflatten(-2, (kv_heads, -1))
    return tree_sum(groups, -2) / groups.shape[-2]


def select_pages(scores: torch.Tensor, pages: torch.Tensor, budget: torch.Tensor, width: int) -> torch.Tensor:
    """The rule: which pages each query attends to.

    scores [..., N] float32, page j's score; those of page 0, of the own page and beyond are ignored. pages and budget
    [...] int64 (broadcastable): pages seen, own included, and pages to keep. width: columns of the answer, at least the
    largest budget. Fixed shapes, no synchronisation.

    Returns [..., width] int64: the kept pages in ascending order, then N as padding.
    """
    n = scores.shape[-1]
    page = torch.arange(n, device=scores.device)
    bits = (scores + 0.0).view(torch.int32)  # + 0.0: minus zero ties with zero
    rank = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # integers in the order of the floats
    key = (rank << 24) + (n - page)  # unique, so any sort is stable: equal scores go to the older page
    own = (pages - 1).unsqueeze(-1)
    key = torch.where((page == 0) | (page == own), _HIGH + n - page, key)
    key = key.masked_fill(page > own, -_HIGH)
    best = key.topk(min(width, n), dim=-1).indices
    if width > n:
        best = torch.nn.functional.pad(best, (0, width - n), value=n)
    place = torch.arange(width, device=scores.device)
    return best.masked_fill(place >= budget.unsqueeze(-1), n).sort(dim=-1).values


def page_mask(selected: torch.Tensor, n: int) -> torch.Tensor:
    """`select_pages`' answer [..., K] over n pages as a mask [..., n] bool."""
    mask = torch.zeros(*selected.shape[:-1], n + 1, dtype=torch.bool, device=selected.device)
    return mask.scatter_(-1, selected, True)[..., :n]
