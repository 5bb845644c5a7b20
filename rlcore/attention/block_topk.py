"""The selection rule of block top-k attention, as pure functions (DistillSparse, sec. 4; Quest's
family).

A sequence is cut into pages of `block_size` tokens; page j holds positions `j*block_size ..`. A
query at position t sees the causal part of `budget` pages out of its `t // block_size + 1`:

- page 0 and its own page (the one that holds t, complete or not) always;
- the pages with the highest scores among the others: the dot product of the page's mean key with
the mean query of the KV head's query group. Equal scores go to the older page.

With `prompt=block` the positions of a prompt choose together, `prompt_block` at a time. The first
of them selects pages as above. The others attend to these pages and to the ones from the first
position's own page to theirs. The first, not a mean: its choice depends on nothing that follows, so
that a shared or cached prefix serves every continuation.

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


def first_page(rule: SparseSpec, pages: torch.Tensor) -> torch.Tensor:
    """The page with which the block of positions begins of a query that sees `pages` pages: any
    shape, int64."""
    together = rule.prompt_block // rule.block_size
    return (pages - 1) // together * together


def choosing_queries(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`group_queries` of the first positions of blocks, rounded to the queries' dtype: an engine
    keeps them in that dtype, for positions that a later step computes."""
    return group_queries(query, kv_heads).to(query.dtype).float()


def with_own_block(scores: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Scores [..., N] of a block's first query, those from page `first` [...] on beyond all others;
    a negative `first` leaves them."""
    page = torch.arange(scores.shape[-1], device=scores.device)
    first = first.unsqueeze(-1)
    return scores.masked_fill((page >= first) & (first >= 0), torch.inf)


def select_pages(
    scores: torch.Tensor, pages: torch.Tensor, budget: torch.Tensor, width: int
) -> torch.Tensor:
    """The rule: which pages each query attends to.

    scores [..., N] float32, page j's score; page 0, the own page and later ones are ignored. pages
    and budget [...] int64 (broadcastable): pages seen, own included, and pages to keep. width:
    columns of the answer, at least the largest budget. Fixed shapes, no synchronisation.

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
class Together:
    """Rows of several tokens that attend to the same pages: n rows of Ns tokens.

    Example, three tokens of a prompt that choose together, then one of a response: bounds [0, 3,
    4], first [8, -1], chooses [0]
    """

    bounds: torch.Tensor  # [n+1] int64, where the tokens of each row begin and end
    first: torch.Tensor  # [n] int64, the page with which each row's block begins; -1: no block
    chooses: torch.Tensor  # [m] int64, rows that begin with the first position of their block
    longest: int

    def queries(
        self, query: torch.Tensor, kept: torch.Tensor, blocks: torch.Tensor
    ) -> torch.Tensor:
        """The queries that choose for each row, with this step's first positions kept.

        query [Ns, H, D]; kept [blocks, kv_heads, D], written in place; blocks [n] int64, the
        physical page of each row's `first` -> [n, kv_heads, D] float32.
        """
        own, heads = query.index_select(0, self.bounds[:-1]), kept.shape[1]
        chosen = choosing_queries(own[self.chooses], heads)
        kept[blocks[self.chooses]] = chosen.to(kept.dtype)
        inside = (self.first >= 0)[:, None, None]
        return torch.where(inside, kept[blocks].float(), group_queries(own, heads))

    def by_head(self, heads: int) -> torch.Tensor:
        """[Ns * heads] int64: the places of (token, head) in the order of row, head, token."""
        lengths = self.bounds.diff().repeat_interleave(heads)
        row, token = _ragged(torch.zeros_like(lengths), lengths)
        return (self.bounds[row // heads] + token) * heads + row % heads


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """Tokens that attend by the rule, ascending, a request's tokens adjacent: Ns tokens in n rows,
    one each unless some choose together."""

    tokens: torch.Tensor | None  # [Ns] int64; None: all tokens of the step
    requests: torch.Tensor  # [n] int64
    pages: torch.Tensor  # [n] int64, pages seen by the row's last token, own included
    budget: torch.Tensor  # [n] int64
    # [n] int32, keys that remain for the row's last token: budget - 1 complete pages and the
    # visible part of the own one. Those before it see one less each.
    kept_len: torch.Tensor
    # (request, first row, end row, most pages) for each request with rows
    spans: list[tuple[int, int, int, int]]
    max_pages: int
    width: int  # largest budget
    together: Together | None = None


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
    have their own. Raises RuntimeError where the rule treats prompts otherwise and prompt_lens is
    missing.
    """
    start = query_start.long()
    seq = seq_lens.long()
    count = start[1:] - start[:-1]
    computed = seq - count
    its_rules = [rule] * len(seq) if rules is None else rules
    dense_until = torch.tensor([r.dense_positions for r in its_rules], dtype=torch.int64)
    if rule.needs_prompts:
        if prompt_lens is None:
            raise RuntimeError(f"prompt={rule.prompt} needs every request's prompt length")
        prompts = prompt_lens.long()
        if rule.prompt == "block":  # whose first position sees everything, so do the others
            size = rule.prompt_block
            prompts = torch.minimum(prompts, (dense_until + size - 1) // size * size)
        dense_until = torch.maximum(dense_until, prompts)
    dense_count = torch.minimum((dense_until - computed).clamp(min=0), count)
    bs = rule.block_size
    done = _ragged(computed // bs, seq // bs - computed // bs)
    dense = _dense_spans(start, computed, count, dense_count)
    until = prompt_lens.long() if rule.prompt == "block" and prompt_lens is not None else None
    sparse = _sparse_rows(its_rules, start, computed, count, dense_count, until)
    return StepPlan(dense, sparse, *done)


def _ragged(first: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, value) of the ranges `first[r] .. first[r] + count[r] - 1`, one after another."""
    rows = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
    before = torch.cumsum(count, 0) - count
    return rows, torch.arange(len(rows), device=count.device) - before[rows] + first[rows]


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
    until: torch.Tensor | None,
) -> PlannedRows | None:
    """`until` [R]: positions below it choose by blocks; None: none does."""
    sparse = count - dense_count
    if not int(sparse.sum()):
        return None
    requests, tokens = _ragged(start[:-1] + dense_count, sparse)
    position = tokens - start[requests] + computed[requests]
    size = rules[0].block_size
    pages = position // size + 1
    together, first = None, None
    if until is not None and bool((position < until[requests]).any()):
        first = torch.where(position < until[requests], first_page(rules[0], pages), -1)
        together = _together(requests, position, first, size)
        last = together.bounds[1:] - 1
        requests, position, pages, first = (x[last] for x in (requests, position, pages, first))
    budget = page_budgets(rules, requests, pages)
    if first is not None:
        led = page_budgets(rules, requests, first.clamp(min=0) + 1) + pages - 1 - first
        budget = torch.where(first < 0, budget, led)
    kept = (budget - 1) * size + position % size + 1
    each = torch.bincount(requests, minlength=len(count))
    end = torch.cumsum(each, 0).tolist()
    last_pages = ((computed + count - 1) // size + 1).tolist()
    spans = [
        (r, e - n, e, p) for r, (n, e, p) in enumerate(zip(each.tolist(), end, last_pages)) if n
    ]
    return PlannedRows(
        tokens if int(dense_count.sum()) else None,
        requests,
        pages,
        budget,
        kept.to(torch.int32),
        spans,
        int(pages.max()),
        int(budget.max()),
        together,
    )


def _together(
    requests: torch.Tensor, position: torch.Tensor, first: torch.Tensor, size: int
) -> Together:
    """Rows of tokens [Ns] that have a request and the first page [Ns] of a block in common."""
    begins = first < 0
    begins[1:] |= (requests[1:] != requests[:-1]) | (first[1:] != first[:-1])
    begins[0] = True
    at = begins.nonzero()[:, 0]
    bounds = torch.cat([at, at.new_tensor([len(first)])])
    chooses = (position[at] == first[at] * size).nonzero()[:, 0]
    return Together(bounds, first[at], chooses, int(bounds.diff().max()))


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
