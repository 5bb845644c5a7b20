"""The selection rule of block top-k attention, as pure functions (DistillSparse, sec. 4; Quest's
family).

A sequence is cut into pages of `block_size` tokens; page j holds positions `j*block_size ..`. A
query at position t sees the causal part of `budget` pages out of its `t // block_size + 1`:

- page 0 and its own page (the one that holds t, complete or not) always;
- the pages with the highest scores among the others: the dot product of the page's mean key with
the mean query of the KV head's query group. Equal scores go to the older page.

Only complete pages are ever scored: every page before the query's own is complete, and the own page
is kept without a score. So a page's summary is computed once, from its `block_size` keys, and
chunking, batching and preemption cannot change it.

Actor and learner must select the same pages from keys that differ in the last bit. Sums here are
trees of element-wise additions, which give the same bits on every device and memory layout, and
ties are broken by index. What remains is the rounding of the two models: pages whose scores agree
to about 1e-6 (relative) may be swapped, for that token and head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlcore.attention.specs import ROUNDING_SLACK, SparseSpec

_HIGH = 2**62  # above every score's sort key


def page_budget(rule: SparseSpec, pages: torch.Tensor) -> torch.Tensor:
    """Pages attended by queries that see `pages` pages: any shape, int64, own page included."""
    if rule.blocks is not None:
        return pages.clamp(max=rule.blocks)
    if rule.blocks_by_length is not None:
        budgets = torch.tensor(rule.blocks_by_length, dtype=pages.dtype, device=pages.device)
        stretch = (pages - 1) * rule.block_size // rule.length_step
        return torch.minimum(pages, budgets[stretch.clamp(min=0, max=len(budgets) - 1)])
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
    """Mean key of complete pages, rounded to the keys' dtype: an engine stores it in that dtype.

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
    """The tokens of a step that attend densely and by the rule, and the pages that the step
    completes."""

    dense: DenseSpans | None
    sparse: PlannedRows | None
    done_requests: torch.Tensor  # [C] int64, request of each page whose last key this step writes
    done_pages: torch.Tensor  # [C] int64, that page's place in its sequence


def plan_step(
    rule: SparseSpec,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    prompt_lens: torch.Tensor | None = None,
    rules: Sequence[SparseSpec] | None = None,
) -> StepPlan:
    """Plan a step in which request r computes positions `seq_lens[r] - q_r .. seq_lens[r] - 1`.

    query_start [R+1], seq_lens [R] on the CPU: as the engine gives them, mixed prefill and decode.
    prompt_lens [R]: the prompts' true lengths, since a position may be computed again after a
    preemption or a weight update. rules [R]: `rule` with the budgets of each request, where these
    have their own. Raises RuntimeError where the rule leaves prompts dense and they
    are missing.
    """
    start = query_start.long()
    seq = seq_lens.long()
    count = start[1:] - start[:-1]
    computed = seq - count
    its_rules = [rule] * len(seq) if rules is None else rules
    dense_until = torch.tensor([r.dense_positions for r in its_rules], dtype=torch.int64)
    if not rule.sparse_prompt:
        if prompt_lens is None:
            raise RuntimeError("sparse_prompt=false needs every request's prompt length")
        dense_until = torch.maximum(dense_until, prompt_lens.long())
    dense_count = torch.minimum((dense_until - computed).clamp(min=0), count)
    bs = rule.block_size
    done = _ragged(computed // bs, seq // bs - computed // bs)
    dense = _dense_spans(start, computed, count, dense_count)
    return StepPlan(dense, _sparse_rows(its_rules, start, computed, count, dense_count), *done)


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
    rules: Sequence[SparseSpec],
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
    size = rules[0].block_size
    pages = position // size + 1
    budget = page_budgets(rules, requests, pages)
    kept = (budget - 1) * size + position % size + 1
    end = torch.cumsum(rows, 0).tolist()
    last_pages = ((computed + count - 1) // size + 1).tolist()
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


def page_budgets(
    rules: Sequence[SparseSpec], requests: torch.Tensor, pages: torch.Tensor
) -> torch.Tensor:
    """The budget of each row [n], by the rule of its request: rules [R], requests and pages [n]."""
    numbers = {rule: number for number, rule in enumerate(dict.fromkeys(rules))}
    if len(numbers) == 1:
        return page_budget(rules[0], pages)
    found = torch.stack([page_budget(rule, pages) for rule in numbers])
    of_row = torch.tensor([numbers[rule] for rule in rules])[requests]
    return found.gather(0, of_row[None])[0]
