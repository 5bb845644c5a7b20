"""Block top-k attention on the learner's side: an attention implementation of transformers, forward
and backward.

Load the model with `attn_implementation=register(dense)`. A forward without `sparse_rows` is then
exactly the dense implementation; with it, the same module with the same weights attends by the
rule:

    dense = model(input_ids=ids, position_ids=pos, use_cache=False).logits
    sparse = model(input_ids=ids, position_ids=pos, use_cache=False,
                   sparse_rows=SparseRows(rule, prompt_lens)).logits

The switch is an argument of the forward, not a global, so that a forward repeated by gradient
checkpointing attends as it did the first time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from rlcore.attention.block_topk import (
    choosing_queries,
    first_page,
    group_queries,
    page_budget,
    page_budgets,
    page_mask,
    page_summaries,
    select_pages,
    with_own_block,
)
from rlcore.attention.specs import SparseSpec
from rlcore.attention.varlen import no_mask
from rlcore.errors import UserError

QUERY_CHUNK = 512  # queries whose masks over tokens exist at one time


@torch.no_grad()
def summaries_of(key: Tensor, block_size: int) -> Tensor:
    """Summaries of each row's complete pages: key [B, Hk, T, D] -> [B, Hk, T // block_size, D]."""
    whole = key.shape[2] // block_size
    return page_summaries(key[:, :, : whole * block_size].unflatten(2, (whole, block_size)))


@torch.no_grad()
def choosing_of(query: Tensor, rule: SparseSpec, kv_heads: int) -> Tensor:
    """The queries that choose for blocks of a prompt's positions: query [B, H, T, D] of whole rows
    -> [B, Hk, blocks, D]."""
    first = query[:, :, :: rule.prompt_block].transpose(1, 2)
    return choosing_queries(first, kv_heads).transpose(1, 2)


@torch.no_grad()
def pages_seen(
    query: Tensor,
    summaries: Tensor,
    rule: SparseSpec,
    start: int,
    prompts: Tensor | None,
    choosing: Tensor | None = None,
) -> Tensor:
    """Return the pages that the queries at positions `start ..` see.

    query [B, H, C, D]; `prompts` [B], lengths where the rule treats prompts otherwise. `choosing`
    is from `choosing_of`, where it does so by blocks -> [B, Hk, C, n] bool, n the pages before the
    last query's end. Pages beyond a query's own may be among the pages of a dense query.
    """
    end = start + query.shape[2]
    position = torch.arange(start, end, device=query.device)
    blocks, inside = None, None
    if prompts is not None:
        inside = position < prompts[:, None]
    if inside is not None and choosing is not None:
        first = first_page(rule, position // rule.block_size + 1)
        budget = page_budget(rule, first + 1) + position // rule.block_size - first
        asked = choosing[:, :, position // rule.prompt_block]
        blocks = _Blocks(inside, first, budget, asked)
    seen = _pages_by(query, summaries, rule, position, end, blocks)
    if inside is not None and rule.prompt == "dense":
        seen = seen | inside[:, None, :, None]
    return seen


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Queries C of prompts that choose by blocks, among others."""

    inside: Tensor  # [B, C] bool, of a prompt
    first: Tensor  # [C] int64, the page with which each one's block begins
    budget: Tensor  # [C] int64, pages kept where `inside`
    choosing: Tensor  # [B, Hk, C, D] float32, the query that chooses for each

    def asked(self, own: Tensor) -> Tensor:
        """own [B, Hk, C, D]: the queries as they are."""
        return torch.where(self.inside[:, None, :, None], self.choosing, own)

    def scored(self, scores: Tensor) -> Tensor:
        """scores [B, Hk, C, N], with the pages of each one's own block beyond all others."""
        return with_own_block(scores, torch.where(self.inside, self.first, -1)[:, None])

    def budgets(self, own: Tensor) -> Tensor:
        """own [C] -> [C], or [B, 1, C] where rows differ."""
        found = torch.where(self.inside, self.budget, own)
        return found[0] if len(found) == 1 else found[:, None]


@torch.no_grad()
def seen_from(
    query: Tensor, summaries: Tensor, rule: SparseSpec, position: Tensor, length: int
) -> Tensor:
    """Return which of a row's first `length` tokens each query sees; queries have their own
    positions.

    query [B, H, C, D], position [B, C] int64, those from `length` on being padding ->
    [B, Hk, C, length] bool.
    """
    at = position.clamp(max=length - 1)[:, None]
    pages = _pages_by(query, summaries, rule, at, length)
    tokens = pages.repeat_interleave(rule.block_size, dim=-1)[..., :length]
    return tokens & (torch.arange(length, device=query.device) <= at[..., None])


def _pages_by(
    query: Tensor,
    summaries: Tensor,
    rule: SparseSpec,
    position: Tensor,
    end: int,
    blocks: _Blocks | None = None,
) -> Tensor:
    """The rule alone: position [C], or [B, 1, C] where rows differ -> [B, Hk, C, n] bool, n the
    pages before `end`."""
    kv_heads, bs = summaries.shape[1], rule.block_size
    n, pages = (end - 1) // bs + 1, position // bs + 1
    mean_query = group_queries(query.transpose(1, 2), kv_heads).transpose(1, 2)  # [B, Hk, C, D]
    mean_query = mean_query if blocks is None else blocks.asked(mean_query)
    # an incomplete last page is the own page of whoever sees it, and needs no score
    scores = mean_query.new_zeros(*mean_query.shape[:3], n)
    complete = min(n, summaries.shape[2])
    scores[..., :complete] = mean_query @ summaries[:, :, :complete].transpose(-1, -2)
    budget, most = page_budget(rule, pages), rule.max_budget(n)
    if blocks is None:
        return _kept(scores, pages, budget, most)
    most += rule.prompt_block // bs - 1
    return _kept(blocks.scored(scores), pages, blocks.budgets(budget), most)


def _kept(scores: Tensor, pages: Tensor, budget: Tensor, width: int) -> Tensor:
    """The rule's pages as a mask: on GPUs by a kernel that needs no sorting, where all rows have
    the same positions."""
    if scores.is_cuda and pages.dim() == budget.dim() == 1:
        from rlcore.attention.kept_pages_gpu import kept_mask  # Triton, which CPUs may lack

        return kept_mask(scores, pages, budget)
    return page_mask(select_pages(scores, pages, budget, width), scores.shape[-1])


@torch.no_grad()
def tokens_seen(pages: Tensor, block_size: int, start: int) -> Tensor:
    """The positions of chosen pages: pages [B, Hk, C, n] of the queries at `start ..` ->
    [B, Hk, C, start + C] bool."""
    end = start + pages.shape[2]
    position = torch.arange(start, end, device=pages.device)
    seen = pages.repeat_interleave(block_size, dim=-1)[..., :end]
    return seen & (torch.arange(end, device=pages.device) <= position[:, None])


BLOCK = 128  # queries and keys of a block: torch's own size, which its kernels always accept
FLEX_QUERY_CHUNK = 2048  # queries whose scores exist at one time


# Block top-k attention by torch's FlexAttention: blocks of keys that no query of a block sees are
# skipped, forward and backward, and no mask over tokens is kept for the backward pass.
#
# For GPUs. On a CPU torch has no compiled backward pass: there masked SDPA attends
# (`implementation.py`), which is also what this is tested against, by torch's plain implementation
# of the same operator, and on an H100 by its kernel (`benchmarks/results/gpu_h100.md`).
#
# A query's own pages are looked up inside the kernel, since each query has its own and blocks of
# queries see the union of theirs.


def attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rules: Sequence[SparseSpec],
    bounds: Sequence[int],
    prompts: Tensor | None,
    scaling: float | None,
) -> Tensor:
    """Causal block top-k attention, differentiable on GPUs.

    query [B, H, T, D], key and value [B, Hk, T, D] -> [B, H, T, D]. bounds: where the sequences of
    every row begin and end, [0, T] for padded rows. rules: one for each of them. prompts [B,
    sequences]: their lengths, where the rules treat prompts otherwise.
    """
    mask = make_block_mask(query, key, rules, bounds, prompts)
    out = flex_kernel(query.device.type)(
        query, key, value, block_mask=mask, scale=scaling, enable_gqa=query.shape[1] > key.shape[1]
    )
    assert isinstance(out, Tensor)
    return out


@cache
def flex_kernel(device: str) -> Any:
    """FlexAttention: on a GPU one compiled kernel for all layers and shapes."""
    return torch.compile(flex_attention) if device == "cuda" else flex_attention


@torch.no_grad()
def make_block_mask(
    query: Tensor,
    key: Tensor,
    rules: Sequence[SparseSpec],
    bounds: Sequence[int],
    prompts: Tensor | None,
) -> BlockMask:
    """Build the rule's selection as a mask for FlexAttention; the arguments are as for
    `attend_blocks`."""
    b, heads, t, _ = query.shape
    kv_heads, count = key.shape[1], -(-t // BLOCK)
    pages = _pages_of(tuple(bounds), tuple(rules), query.device)
    seen = _seen_pages(query, key, pages, rules[0], prompts, count * BLOCK)
    of_block = seen.unflatten(2, (count, BLOCK)).any(3).int()
    blocks = of_block.new_zeros(b, kv_heads, count, count)
    for tokens in pages.marks:  # a page may reach into further blocks
        blocks.index_add_(3, tokens // BLOCK, of_block)
    # a query's own page may go on after its block
    causal = torch.ones(count, count, dtype=torch.bool, device=blocks.device).tril()
    per_head = ((blocks > 0) & causal).repeat_interleave(heads // kv_heads, dim=1).int()
    return BlockMask.from_kv_blocks(
        per_head.sum(-1, dtype=torch.int32),
        per_head.argsort(dim=-1, descending=True, stable=True).int(),
        BLOCK_SIZE=BLOCK,
        mask_mod=_looked_up(seen, pages, heads // kv_heads),
        seq_lengths=(t, t),
    )


@dataclass(frozen=True, slots=True)
class _PageLayout:
    """The pages of a row's sequences, one sequence after another: P of T tokens.

    Example, sequences of 5 and 3 tokens in pages of 4. begin [0, 4, 5], first [0, 0, 0, 0, 0, 2, 2,
    2], position [0, 1, 2, 3, 4, 0, 1, 2]
    """

    size: int
    bounds: tuple[int, ...]
    begin: Tensor  # [P] int64, the first token of each
    first: Tensor  # [T] int64, the first page of a token's sequence
    sequence: Tensor  # [T] int64
    position: Tensor  # [T] int64, within the sequence
    budget: Tensor  # [T] int64, pages that a token's query keeps
    block: Tensor  # [T] int64, the page of its sequence with which a token's block begins
    block_budget: Tensor  # [T] int64, pages that its query keeps where it chooses by blocks
    marks: list[Tensor]  # each [P]: a token of every page, of each block that it may reach into

    def of_chunk(self, start: int, end: int) -> tuple[int, int, int]:
        """(first page, end of pages, most pages of one sequence) that the queries of some tokens
        may see. On the host."""
        before, low, most = 0, -1, 0
        for a, z in pairwise(self.bounds):
            if start < z and a < end:
                low = before if low < 0 else low
                here = -(-(min(z, end) - a) // self.size)
                most, high = max(most, here), before + here
            before += -(-(z - a) // self.size)
        return low, high, most


@lru_cache(maxsize=8)  # the same for every layer of a forward
def _pages_of(
    bounds: tuple[int, ...], rules: tuple[SparseSpec, ...], device: torch.device
) -> _PageLayout:
    size = rules[0].block_size
    lengths = torch.tensor([z - a for a, z in pairwise(bounds)])
    starts = torch.tensor(bounds[:-1])
    counts = (lengths + size - 1) // size
    first = torch.cumsum(counts, 0) - counts
    of_page = torch.repeat_interleave(torch.arange(len(counts)), counts)
    begin = starts[of_page] + size * (torch.arange(len(of_page)) - first[of_page])
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = torch.arange(len(sequence)) - starts[sequence]
    last = (starts + lengths)[of_page] - 1
    offsets = (*range(0, size, BLOCK), size - 1)
    seen = position // size + 1
    block = first_page(rules[0], seen)
    of_block = page_budgets(rules, sequence, block + 1) + seen - 1 - block
    return _PageLayout(
        size,
        bounds,
        begin.to(device),
        first[sequence].to(device),
        sequence.to(device),
        position.to(device),
        page_budgets(rules, sequence, seen).to(device),
        block.to(device),
        of_block.to(device),
        [torch.minimum(begin + offset, last).to(device) for offset in offsets],
    )


def _seen_pages(
    query: Tensor,
    key: Tensor,
    pages: _PageLayout,
    rule: SparseSpec,
    prompts: Tensor | None,
    rows: int,
) -> Tensor:
    """[B, Hk, rows, P] bool: the pages that each query sees, in as many steps for many sequences as
    for one. `rule`: how all sequences treat prompts; `rows`: at least T; those beyond see nothing.
    """
    b, kv_heads, size, device = query.shape[0], key.shape[1], pages.size, query.device
    total, t = len(pages.begin), query.shape[2]
    # what an incomplete page takes from its neighbour is never read: it is its queries' own
    tokens = (pages.begin[:, None] + torch.arange(size, device=device)).clamp(max=t - 1)
    summaries = page_summaries(key[:, :, tokens])  # [B, Hk, P, D]
    # one more, for what is no page of a query's sequence; kernels may look beyond the last query
    seen = query.new_zeros(b, kv_heads, rows, total + 1, dtype=torch.bool)
    for a in range(0, t, FLEX_QUERY_CHUNK):
        z = min(t, a + FLEX_QUERY_CHUNK)
        low, high, most = pages.of_chunk(a, z)
        mean_query = group_queries(query[:, :, a:z].transpose(1, 2), kv_heads).transpose(1, 2)
        column, position = torch.arange(most, device=device), pages.position[a:z]
        inside = None if prompts is None else position < prompts[:, pages.sequence[a:z]]  # [B, C]
        blocks = None
        if inside is not None and rule.prompt == "block":
            chooses = torch.arange(a, z, device=device) - position % rule.prompt_block
            asked = choosing_queries(query[:, :, chooses].transpose(1, 2), kv_heads)
            own_block = (pages.block[a:z], pages.block_budget[a:z])
            blocks = _Blocks(inside, *own_block, asked.transpose(1, 2))
            mean_query = blocks.asked(mean_query)
        scores = mean_query @ summaries[:, :, low:high].transpose(-1, -2)
        at = pages.first[a:z, None] + column  # [C, most]: pages of the query's own sequence
        own = (at - low).clamp(max=high - low - 1).expand(*scores.shape[:2], -1, -1)
        visible = position // size + 1
        found, budget = scores.gather(3, own), pages.budget[a:z]
        if blocks is not None:
            found, budget = blocks.scored(found), blocks.budgets(budget)
        kept = _kept(found, visible, budget, most)
        if inside is not None and rule.prompt == "dense":
            kept = kept | inside[:, None, :, None]
        there = column < visible[:, None]
        seen[:, :, a:z].scatter_(3, at.where(there, total).expand_as(kept), kept & there)
    return seen[..., :total]


def _looked_up(
    seen: Tensor, pages: _PageLayout, group: int
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return whether a query sees a key: one of a page that it sees, and not after it."""
    page = F.pad(pages.first + pages.position // pages.size, (0, seen.shape[2] - len(pages.first)))

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & seen[row, head // group, query, page[key]]

    return sees


# By the dense implementation. The last three are GPUs' kernels, where block masks take the place of
# masks over tokens. transformers tries to import any name that contains "flash".
_NAMES = {
    "sdpa": "block_topk_sdpa",
    "eager": "block_topk_eager",
    "varlen": "block_topk_flex",
    "fa4": "block_topk_flex",
    "flash_attention_2": "block_topk_flex",
}
_BY_BLOCKS = _NAMES["varlen"]


@dataclass(frozen=True, slots=True)
class SparseRows:
    """How to interpret the rows of one forward.

    Rows start at position 0 in column 0 and are right-padded, or one row holds several packed
    sequences. prompt_lens: prompt tokens of each sequence, in order; required unless `rule.prompt`
    is sparse. cu_seqlens: for one packed row, the S+1 boundaries of its S
    sequences, from 0 to the row's length; None for right-padded rows. rules: one for each sequence,
    in order, with the page size of `rule` and its settings of prompts; None: `rule` for all.

    Example, two sequences of 5 and 3 tokens packed: SparseRows(rule, cu_seqlens=[0, 5, 8])
    """

    rule: SparseSpec
    prompt_lens: Sequence[int] | None = None
    cu_seqlens: Sequence[int] | None = None
    rules: Sequence[SparseSpec] | None = None

    def of_sequence(self, i: int) -> SparseRows:
        """One of the sequences alone, as its own row."""
        prompt = None if self.prompt_lens is None else self.prompt_lens[i : i + 1]
        return SparseRows(self.rule if self.rules is None else self.rules[i], prompt)

    def __post_init__(self) -> None:
        if self.rule.needs_prompts and self.prompt_lens is None:
            raise ValueError(f"prompt={self.rule.prompt} needs the prompt lengths of the rows")


def register(dense: str = "sdpa") -> str:
    """Register with transformers and return the implementation's name.

    `dense` serves forwards without `sparse_rows`. Beside a GPU's kernel (varlen, fa4,
    flash_attention_2) FlexAttention computes sparse forwards, and a forward without `sparse_rows`
    is a RuntimeError. Raises UserError for another dense implementation.
    """
    if dense not in _NAMES:
        raise UserError.choice("learner.attention", dense, tuple(_NAMES))
    name = _NAMES[dense]
    attend_sparsely = attend_rows_by_blocks if name == _BY_BLOCKS else attend_rows

    # transformers calls it with these names
    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        sparse_rows: SparseRows | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if sparse_rows is None:
            return _dense(dense)(module, query, key, value, attention_mask, **kwargs)
        if kwargs.get("sliding_window") is not None or kwargs.get("dropout"):
            raise RuntimeError("block top-k attention supports no sliding window and no dropout")
        out = attend_sparsely(query, key, value, sparse_rows, kwargs.get("scaling"))
        return out.transpose(1, 2).contiguous(), None

    mask = no_mask if name == _BY_BLOCKS else ALL_MASK_ATTENTION_FUNCTIONS[dense]
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    return name


def _dense(name: str) -> Any:
    """The implementation that transformers knows under `name`."""
    if _NAMES[name] == _BY_BLOCKS:
        raise RuntimeError(
            f"{_BY_BLOCKS} attends sparsely only: load the model with {name} for a dense forward"
        )
    return ALL_ATTENTION_FUNCTIONS[name]


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, rows: SparseRows, scaling: float | None = None
) -> Tensor:
    """Causal block top-k attention, differentiable.

    query [B, H, T, D], key and value [B, Hk, T, D] -> [B, H, T, D]. Columns after a row's last
    token yield meaningless values and reach no other column.
    """
    bounds = _bounds(query, key, rows)
    if rows.cu_seqlens is None and rows.rules is None:
        return _attend(query, key, value, rows, scaling)
    if rows.cu_seqlens is None:
        each = zip(query.split(1), key.split(1), value.split(1))
        parts = [_attend(*one, rows.of_sequence(i), scaling) for i, one in enumerate(each)]
        return torch.cat(parts)
    parts = []
    for i, (a, b) in enumerate(pairwise(bounds)):
        one = (query[:, :, a:b], key[:, :, a:b], value[:, :, a:b])
        parts.append(_attend(*one, rows.of_sequence(i), scaling))
    return torch.cat(parts, dim=2)


def attend_rows_by_blocks(
    query: Tensor, key: Tensor, value: Tensor, rows: SparseRows, scaling: float | None = None
) -> Tensor:
    """`attend_rows` by FlexAttention, whose backward pass needs a GPU."""
    bounds = _bounds(query, key, rows)
    if rows.rules is not None and rows.cu_seqlens is None:
        each = zip(query.split(1), key.split(1), value.split(1))
        own = [
            attend_rows_by_blocks(*one, rows.of_sequence(i), scaling) for i, one in enumerate(each)
        ]
        return torch.cat(own)
    shape = (query.shape[0], len(bounds) - 1)
    until = None
    if rows.rule.needs_prompts:
        prompts = rows.prompt_lens
        if prompts is None or len(prompts) != shape[0] * shape[1]:
            raise ValueError(f"{shape[0] * shape[1]} sequences need as many prompt lengths")
        until = torch.as_tensor(list(prompts), device=query.device).view(shape)
    rules = [rows.rule] * shape[1] if rows.rules is None else rows.rules
    return attend_blocks(query, key, value, rules, bounds, until, scaling)


def _bounds(query: Tensor, key: Tensor, rows: SparseRows) -> list[int]:
    """Where sequences begin and end in every row; raises ValueError where rows do not fit."""
    if query.shape[2] != key.shape[2]:
        raise ValueError("block top-k attention on the learner takes whole sequences, not a cache")
    if rows.cu_seqlens is None:
        return [0, query.shape[2]]
    bounds = list(rows.cu_seqlens)
    if query.shape[0] != 1 or bounds[0] != 0 or bounds[-1] != query.shape[2]:
        raise ValueError(
            f"packed rows: boundaries {bounds} do not cover one row of {query.shape[2]} tokens"
        )
    return bounds


def _attend(
    query: Tensor, key: Tensor, value: Tensor, rows: SparseRows, scaling: float | None
) -> Tensor:
    """Rows that all start in column 0, in chunks of queries so that masks stay small."""
    rule, t = rows.rule, query.shape[2]
    dense_end, prompts = _dense_prefix(rows, query.shape[0], t, query.device)
    parts = []
    if dense_end:
        q, k, v = (x[:, :, :dense_end] for x in (query, key, value))
        parts.append(attend_groups(q, k, v, None, scaling))
    summaries = summaries_of(key, rule.block_size)
    choosing = choosing_of(query, rule, key.shape[1]) if rule.prompt == "block" else None
    for a in range(dense_end, t, QUERY_CHUNK):
        z = min(t, a + QUERY_CHUNK)
        q, k, v = query[:, :, a:z], key[:, :, :z], value[:, :, :z]
        pages = pages_seen(q, summaries, rule, a, prompts, choosing)
        parts.append(attend_groups(q, k, v, tokens_seen(pages, rule.block_size, a), scaling))
    return torch.cat(parts, dim=2)


def attend_groups(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """SDPA with one mask for each KV head's group of queries; without a mask, causal.

    q [B, H, C, D], k and v [B, Hk, T, D], mask [B, Hk, C, T] bool -> [B, H, C, D].
    """
    (b, heads, c, d), (kv_heads, t) = q.shape, k.shape[1:3]
    # KV heads join the batch, so that one mask serves a whole group without a copy
    folded = (b * kv_heads, heads // kv_heads)
    k, v = (x.reshape(-1, 1, t, d).expand(*folded, t, d) for x in (k, v))
    out = F.scaled_dot_product_attention(
        q.reshape(*folded, c, d),
        k,
        v,
        attn_mask=None if mask is None else mask.view(-1, 1, c, t),
        is_causal=mask is None,
        scale=scaling,
    )
    return out.reshape(q.shape)


def _dense_prefix(
    rows: SparseRows, b: int, t: int, device: torch.device
) -> tuple[int, Tensor | None]:
    """Columns that attend densely in every row; each row's prompt length [b] where prompts differ
    from what follows them."""
    end = min(t, rows.rule.dense_positions)
    if not rows.rule.needs_prompts:
        return end, None
    prompts = rows.prompt_lens
    if prompts is None or len(prompts) != b:
        raise ValueError(f"{b} rows need as many prompt lengths, not {prompts}")
    until = torch.as_tensor(list(prompts), device=device)
    return min(t, max(end, min(prompts))) if rows.rule.prompt == "dense" else end, until
