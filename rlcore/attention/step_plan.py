"""The plan of block top-k attention for one engine step, computed once from lengths and used by all
layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlcore.attention.block_topk import page_budget
from rlcore.attention.specs import SparseSpec


@dataclass(frozen=True, slots=True)
class DenseSpans:
    """Leading tokens of some requests' slices that attend to everything before them: Nd tokens of
    Rd requests.

    Example, request 0 of 3 prompt tokens, all dense: DenseSpans(None, [0], [0, 3], [3])
    """

    # [Nd] int64, places in the step's token list; None: all tokens of the step
    tokens: torch.Tensor | None
    requests: torch.Tensor  # [Rd] int64
    query_start: torch.Tensor  # [Rd+1] int32, cumulative lengths of the spans
    seq_lens: torch.Tensor  # [Rd] int32, keys visible to each span's last token


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """Tokens that attend by the rule, one row each: Ns tokens, ascending, those of a request
    adjacent."""

    tokens: torch.Tensor | None  # [Ns] int64; None: all tokens of the step
    requests: torch.Tensor  # [Ns] int64
    pages: torch.Tensor  # [Ns] int64, pages seen, own included
    budget: torch.Tensor  # [Ns] int64
    # [Ns] int32, keys that remain: budget - 1 complete pages and the visible part of the own one
    kept_len: torch.Tensor
    # (request, first row, end row, most pages) for each request with rows
    spans: list[tuple[int, int, int, int]]
    max_pages: int
    width: int  # largest budget


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Which tokens attend densely, which by the rule, and which pages this step completes."""

    dense: DenseSpans | None
    sparse: PlannedRows | None
    done_requests: torch.Tensor  # [C] int64, request of each page whose last key this step writes
    done_pages: torch.Tensor  # [C] int64, that page's place in its sequence


def plan_step(
    rule: SparseSpec,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    prompt_lens: torch.Tensor | None = None,
) -> StepPlan:
    """Plan a step in which request r computes positions `seq_lens[r] - q_r .. seq_lens[r] - 1`.

    query_start [R+1], seq_lens [R] on the CPU: as the engine gives them, mixed prefill and decode.
    prompt_lens [R]: the prompts' true lengths, since a position may be computed again after a
    preemption or a weight update. Raises RuntimeError where the rule leaves prompts dense and they
    are missing.
    """
    start = query_start.long()
    seq = seq_lens.long()
    count = start[1:] - start[:-1]
    computed = seq - count
    dense_until = torch.full_like(seq, rule.dense_positions)
    if not rule.sparse_prompt:
        if prompt_lens is None:
            raise RuntimeError("sparse_prompt=false needs every request's prompt length")
        dense_until = torch.maximum(dense_until, prompt_lens.long())
    dense_count = torch.minimum((dense_until - computed).clamp(min=0), count)
    bs = rule.block_size
    done = _ragged(computed // bs, seq // bs - computed // bs)
    dense = _dense_spans(start, computed, count, dense_count)
    return StepPlan(dense, _sparse_rows(rule, start, computed, count, dense_count), *done)


def _ragged(first: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, value) of the ranges `first[r] .. first[r] + count[r] - 1`, one after another."""
    rows = torch.repeat_interleave(torch.arange(len(count)), count)
    before = torch.cumsum(count, 0) - count
    return rows, torch.arange(len(rows)) - before[rows] + first[rows]


def _dense_spans(
    start: torch.Tensor, computed: torch.Tensor, count: torch.Tensor, dense_count: torch.Tensor
) -> DenseSpans | None:
    requests = dense_count.nonzero()[:, 0]
    if not len(requests):
        return None
    lengths = dense_count[requests]
    query_start = torch.zeros(len(requests) + 1, dtype=torch.int32)
    query_start[1:] = torch.cumsum(lengths, 0)
    everything = bool((dense_count == count).all())
    tokens = None if everything else _ragged(start[:-1], dense_count)[1]
    return DenseSpans(tokens, requests, query_start, (computed[requests] + lengths).to(torch.int32))


def _sparse_rows(
    rule: SparseSpec,
    start: torch.Tensor,
    computed: torch.Tensor,
    count: torch.Tensor,
    dense_count: torch.Tensor,
) -> PlannedRows | None:
    rows = count - dense_count
    if not int(rows.sum()):
        return None
    requests, tokens = _ragged(start[:-1] + dense_count, rows)
    position = tokens - start[requests] + computed[requests]
    pages = position // rule.block_size + 1
    budget = page_budget(rule, pages)
    kept = (budget - 1) * rule.block_size + position % rule.block_size + 1
    end = torch.cumsum(rows, 0).tolist()
    last_pages = ((computed + count - 1) // rule.block_size + 1).tolist()
    spans = [
        (r, e - n, e, p) for r, (n, e, p) in enumerate(zip(rows.tolist(), end, last_pages)) if n
    ]
    whole = not int(dense_count.sum())
    return PlannedRows(
        None if whole else tokens,
        requests,
        pages,
        budget,
        kept.to(torch.int32),
        spans,
        int(pages.max()),
        int(budget.max()),
    )
