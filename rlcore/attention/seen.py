"""Which pages and tokens the queries of a sequence see, on the learner's side."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.attention.block_topk import (
    group_queries,
    page_budget,
    page_mask,
    page_summaries,
    select_pages,
)
from rlcore.attention.specs import SparseSpec

QUERY_CHUNK = 512  # queries whose masks over tokens exist at one time


@torch.no_grad()
def summaries_of(key: Tensor, block_size: int) -> Tensor:
    """Summaries of each row's complete pages: key [B, Hk, T, D] -> [B, Hk, T // block_size, D]."""
    whole = key.shape[2] // block_size
    return page_summaries(key[:, :, : whole * block_size].unflatten(2, (whole, block_size)))


@torch.no_grad()
def pages_seen(
    query: Tensor, summaries: Tensor, rule: SparseSpec, start: int, dense_until: Tensor | None
) -> Tensor:
    """Which pages the queries at positions `start ..` see.

    query [B, H, C, D], `dense_until` [B] or None -> [B, Hk, C, n] bool, n the pages before the last
    query's end. Pages beyond a query's own may be among those of a dense query.
    """
    end = start + query.shape[2]
    position = torch.arange(start, end, device=query.device)
    seen = _pages_by(query, summaries, rule, position, end)
    if dense_until is not None:
        seen = seen | (position < dense_until[:, None])[:, None, :, None]
    return seen


@torch.no_grad()
def seen_from(
    query: Tensor, summaries: Tensor, rule: SparseSpec, position: Tensor, length: int
) -> Tensor:
    """Which of a row's first `length` tokens each query sees, at positions of its own.

    query [B, H, C, D], position [B, C] int64, those from `length` on being padding ->
    [B, Hk, C, length] bool.
    """
    at = position.clamp(max=length - 1)[:, None]
    pages = _pages_by(query, summaries, rule, at, length)
    tokens = pages.repeat_interleave(rule.block_size, dim=-1)[..., :length]
    return tokens & (torch.arange(length, device=query.device) <= at[..., None])


def _pages_by(
    query: Tensor, summaries: Tensor, rule: SparseSpec, position: Tensor, end: int
) -> Tensor:
    """The rule alone: position [C], or [B, 1, C] where rows differ -> [B, Hk, C, n] bool, n the
    pages before `end`."""
    kv_heads, bs = summaries.shape[1], rule.block_size
    n, pages = (end - 1) // bs + 1, position // bs + 1
    mean_query = group_queries(query.transpose(1, 2), kv_heads).transpose(1, 2)  # [B, Hk, C, D]
    # an incomplete last page is the own page of whoever sees it, and needs no score
    scores = mean_query.new_zeros(*mean_query.shape[:3], n)
    complete = min(n, summaries.shape[2])
    scores[..., :complete] = mean_query @ summaries[:, :, :complete].transpose(-1, -2)
    return _kept(scores, pages, page_budget(rule, pages), rule.max_budget(n))


def _kept(scores: Tensor, pages: Tensor, budget: Tensor, width: int) -> Tensor:
    """The rule's pages as a mask: on GPUs by a kernel that needs no sorting, where all rows have
    the same positions."""
    if scores.is_cuda and pages.dim() == 1:
        from rlcore.attention.kept_pages_gpu import kept_mask  # Triton, which CPUs may lack

        return kept_mask(scores, pages, budget)
    return page_mask(select_pages(scores, pages, budget, width), scores.shape[-1])


@torch.no_grad()
def tokens_seen(pages: Tensor, block_size: int, start: int) -> Tensor:
    """The same as tokens: pages [B, Hk, C, n] of the queries at `start ..` -> [B, Hk, C, start + C]
    bool."""
    end = start + pages.shape[2]
    position = torch.arange(start, end, device=pages.device)
    seen = pages.repeat_interleave(block_size, dim=-1)[..., :end]
    return seen & (torch.arange(end, device=pages.device) <= position[:, None])
