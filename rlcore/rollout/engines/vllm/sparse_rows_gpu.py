"""The tensor operations of the CUDA backend: rows of a step, selection of pages, FlashAttention on
the kept pages. The kernels are arguments, so that the code around them can be tested without a GPU.
Shapes as in `sparse_backend_gpu`: a cache is [blocks, kv_heads, block_size, 2 * head_dim],
head-major, keys in the first half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from rlcore.attention.block_topk import (
    StepPlan,
    Together,
    group_queries,
    page_budget,
    page_summaries,
    select_pages,
    with_own_block,
)
from rlcore.attention.specs import SparseSpec

ROW_CHUNK = 2048  # prompt tokens whose scores exist at one time


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens that attend by the rule, all on the device. n rows."""

    tokens: torch.Tensor | None  # [n] int64; None: row i is token i
    requests: torch.Tensor | None  # [n] int64; None: row i belongs to request i
    pages: torch.Tensor  # [n] int64
    budget: torch.Tensor  # [n] int64
    kept_len: torch.Tensor  # [n] int32
    max_pages: int
    width: int
    together: Together | None = None  # rows of several tokens; then n rows have more tokens


@dataclass(frozen=True, slots=True)
class Dense:
    """Tokens that attend densely next to others that do not, all on the device."""

    tokens: torch.Tensor  # [Nd] int64
    requests: torch.Tensor  # [Rd] int64
    query_start: torch.Tensor  # [Rd+1] int32
    seq_lens: torch.Tensor  # [Rd] int32
    max_query: int
    max_seq: int


class Flash(Protocol):
    """Causal attention over a paged cache. query and out [tokens, H, D], caches [blocks,
    block_size, Hk, D]. The parameters are as in FlashAttention's varlen function."""

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        out: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        max_query: int,
        max_seq: int,
    ) -> None: ...


class Select(Protocol):
    """`kept_blocks` or the kernel that equals it."""

    def __call__(
        self,
        query: torch.Tensor,
        summaries: torch.Tensor,
        block_table: torch.Tensor,
        rows: Rows,
        a: int,
        z: int,
    ) -> torch.Tensor: ...


def decode_rows(
    rule: SparseSpec,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_pages: int,
    budget: torch.Tensor | None = None,
) -> tuple[Rows, torch.Tensor]:
    """The rows of a step with one token a request, and the physical block that each fills [R].

    budget [R] int64: the pages of requests that bring their own rules; None: by `rule`.

    That is 0, which vLLM gives to no request, for a row whose token does not complete its page:
    only complete pages are ever scored. Fixed shapes, device only, so that it can be captured.
    Padding rows have length 0: one page, nothing kept.
    """
    bs = rule.block_size
    seq = seq_lens.long()
    last = (seq - 1).clamp(min=0)
    pages = last // bs + 1
    if budget is None:
        budget = page_budget(rule, pages)
    kept = torch.where(seq > 0, (budget - 1) * bs + last % bs + 1, 0)
    # a request's own rule may keep more than the engine's, up to every page
    width = max_pages if rule.blocks_by_length is not None else rule.max_budget(max_pages)
    rows = Rows(None, None, pages, budget, kept.int(), max_pages, width)
    own = block_table.gather(1, (pages - 1)[:, None])[:, 0].long()
    return rows, torch.where((seq > 0) & (seq % bs == 0), own, 0)


class DecodeBuffers:
    """The rows of decode steps at addresses that stay: a captured graph reads the addresses of its
    capture, so each step writes its lengths into the same memory."""

    def __init__(
        self, rule: SparseSpec, max_rows: int, max_pages: int, device: torch.device | str
    ) -> None:
        """`max_rows`: of a step; `max_pages`: of the longest context."""
        self._rule = rule
        self._max_pages = max_pages
        self._pages = torch.ones(max_rows, dtype=torch.int64, device=device)
        self._budget = torch.ones(max_rows, dtype=torch.int64, device=device)
        self._kept = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._filled = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def fill(
        self,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        budget: torch.Tensor | None = None,
    ) -> tuple[Rows, torch.Tensor]:
        """`decode_rows` of this step, in the buffers; `budget` may be on the host.

        Rows beyond the step's become padding: a graph captured with more rows than the step has
        requests keeps nothing for them, and they fill no page.
        """
        if budget is not None:
            budget = budget.to(seq_lens.device, non_blocking=True)
        rows, filled = decode_rows(self._rule, seq_lens, block_table, self._max_pages, budget)
        n = len(rows.pages)
        for buffer, value, padding in (
            (self._pages, rows.pages, 1),
            (self._budget, rows.budget, 1),
            (self._kept, rows.kept_len, 0),
            (self._filled, filled, 0),
        ):
            buffer[:n].copy_(value)
            buffer[n:].fill_(padding)
        held = Rows(
            None,
            None,
            self._pages[:n],
            self._budget[:n],
            self._kept[:n],
            rows.max_pages,
            rows.width,
        )
        return held, self._filled[:n]


def mixed_rows(
    plan: StepPlan, block_table: torch.Tensor
) -> tuple[Rows | None, Dense | None, torch.Tensor]:
    """A host plan on the device: (rows or None if all tokens attend densely, dense part, physical
    blocks completed)."""

    def on(x: torch.Tensor) -> torch.Tensor:
        return x.to(block_table.device, non_blocking=True)

    summarise = block_table[on(plan.done_requests), on(plan.done_pages)].long()
    r, d = plan.sparse, plan.dense
    if r is None:
        return None, None, summarise
    tokens = None if r.tokens is None else on(r.tokens)
    rows = Rows(
        tokens,
        on(r.requests),
        on(r.pages),
        on(r.budget),
        on(r.kept_len),
        r.max_pages,
        r.width,
        None if r.together is None else _placed(r.together, on),
    )
    if d is None:
        return rows, None, summarise
    if d.tokens is None:
        raise RuntimeError("a step with rows of both kinds lacks its dense part")
    longest, most = int(d.query_start.diff().max()), int(d.seq_lens.max())
    dense = Dense(on(d.tokens), on(d.requests), on(d.query_start), on(d.seq_lens), longest, most)
    return rows, dense, summarise


def _placed(rows: Together, on: Callable[[torch.Tensor], torch.Tensor]) -> Together:
    return Together(on(rows.bounds), on(rows.first), on(rows.chooses), rows.longest)


def summarise_pages(kv_cache: torch.Tensor, summaries: torch.Tensor, blocks: torch.Tensor) -> None:
    """Write the mean keys of physical pages into summaries [blocks, kv_heads, D], in their dtype:
    the cache's, to which the learner rounds them too.

    blocks [C] int64; what is written for block 0 is never read.
    """
    keys = kv_cache[..., : summaries.shape[-1]].index_select(0, blocks)
    summaries.index_copy_(0, blocks, page_summaries(keys).to(summaries.dtype))


def attend_dense(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    part: Dense,
    output: torch.Tensor,
    flash: Flash,
) -> None:
    """Attend with the dense part's tokens; the rest of output [tokens, H, D] stays as it is."""
    key_cache, value_cache = kv_cache.transpose(1, 2).split(query.shape[-1], dim=-1)
    q = query.index_select(0, part.tokens)
    out = torch.empty_like(q)
    table = block_table.index_select(0, part.requests)
    flash(
        q,
        key_cache,
        value_cache,
        out,
        part.query_start,
        part.seq_lens,
        table,
        part.max_query,
        part.max_seq,
    )
    output.index_copy_(0, part.tokens, out)


def attend_rows(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    summaries: torch.Tensor,
    block_table: torch.Tensor,
    rows: Rows,
    output: torch.Tensor,
    flash: Flash,
    select: Select,
) -> None:
    """Attend with the rows' tokens by the rule; the rest of output [tokens, H, D] stays as it is.

    Eight parameters: what one layer holds, the step's rows, and the two kernels.
    """
    heads, size = kv_cache.shape[1:3]
    per_token, dim = query.shape[1] // heads, query.shape[2]
    key_cache, value_cache = _one_headed(kv_cache, dim)
    n = len(rows.pages)
    q = query[:n] if rows.tokens is None else query.index_select(0, rows.tokens)
    out = output[:n] if rows.tokens is None else torch.empty_like(q)
    chunk = n if rows.requests is None else ROW_CHUNK
    for a in range(0, n, chunk):
        z = min(n, a + chunk)
        m = (z - a) * heads
        table = select(q[a:z], summaries, block_table, rows, a, z)
        start = torch.arange(m + 1, dtype=torch.int32, device=q.device)
        lens = rows.kept_len[a:z].repeat_interleave(heads, output_size=m)
        flash(
            q[a:z].reshape(m, per_token, dim),
            key_cache,
            value_cache,
            out[a:z].view(m, per_token, dim),
            start,
            lens,
            table.view(m, -1),
            1,
            rows.width * size,
        )
    if rows.tokens is not None:
        output.index_copy_(0, rows.tokens, out)


def attend_together(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor],
    block_table: torch.Tensor,
    rows: Rows,
    output: torch.Tensor,
    flash: Flash,
) -> None:
    """`attend_rows` of rows of which some have several tokens, all in one call: a row is a sequence
    of FlashAttention for each KV head.

    kept: the layer's summaries and its choosing queries, each [blocks, kv_heads, D]; the latter are
    written where this step has some.
    """
    together, requests = rows.together, rows.requests
    if together is None or requests is None:
        raise RuntimeError("no rows of this step choose together")
    (heads, size), dim = kv_cache.shape[1:3], query.shape[2]
    key_cache, value_cache = _one_headed(kv_cache, dim)
    summaries, choosing = kept
    order = together.by_head(heads)
    tokens = len(order) // heads
    q = query[:tokens] if rows.tokens is None else query.index_select(0, rows.tokens)
    chosen = block_table[requests, together.first.clamp(min=0)].long()
    asked = together.queries(q, choosing, chosen)
    table = _kept(asked, summaries, block_table, rows, (0, len(requests)))
    lengths = together.bounds.diff().repeat_interleave(heads)
    start = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    per_head = q.reshape(tokens * heads, -1, dim).index_select(0, order)
    out = torch.empty_like(per_head)
    flash(
        per_head,
        key_cache,
        value_cache,
        out,
        start,
        rows.kept_len.repeat_interleave(heads),
        table.flatten(0, 1),
        together.longest,
        rows.width * size,
    )
    found = torch.empty_like(out).index_copy_(0, order, out).view(tokens, *output.shape[1:])
    if rows.tokens is None:
        output[:tokens] = found
    else:
        output.index_copy_(0, rows.tokens, found)


def _one_headed(kv_cache: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    """Keys and values as [blocks * kv_heads, block_size, 1, D] views of a head-major cache."""
    blocks, heads, size, width = kv_cache.shape
    step = (kv_cache.stride(1), kv_cache.stride(2), kv_cache.stride(2), kv_cache.stride(3))
    one_headed = kv_cache.as_strided(
        (blocks * heads, size, 1, width), step, kv_cache.storage_offset()
    )
    return one_headed.split(dim, dim=-1)


def kept_blocks(
    query: torch.Tensor,
    summaries: torch.Tensor,
    block_table: torch.Tensor,
    rows: Rows,
    a: int,
    z: int,
) -> torch.Tensor:
    """Block table of rows a..z-1 over one-headed blocks: [z - a, kv_heads, width] int32.

    query [z - a, H, D], summaries [blocks, kv_heads, D]. The shared rule, in plain torch on any
    device.
    """
    return _kept(group_queries(query, summaries.shape[1]), summaries, block_table, rows, (a, z))


def _kept(
    asked: torch.Tensor,
    summaries: torch.Tensor,
    block_table: torch.Tensor,
    rows: Rows,
    chunk: tuple[int, int],
) -> torch.Tensor:
    """`kept_blocks` by the queries that choose, [z - a, kv_heads, D] float32."""
    heads, (a, z) = summaries.shape[1], chunk
    table = block_table[:, : rows.max_pages]
    if rows.requests is not None:
        table = table.index_select(0, rows.requests[a:z])
    pages = rows.pages[a:z]
    gathered = summaries[table.long()].float()
    found = torch.einsum("nhd,nphd->nhp", asked, gathered)
    if rows.together is not None:
        found = with_own_block(found, rows.together.first[a:z, None])
    kept = select_pages(found, pages[:, None], rows.budget[a:z, None], rows.width)
    # Padding must be a valid index, but is never read: the row's length ends before it.
    kept = kept.clamp(max=table.shape[1] - 1)
    physical = table[:, None].expand(-1, heads, -1).gather(2, kept)
    return physical * heads + torch.arange(heads, dtype=torch.int32, device=table.device)[:, None]
