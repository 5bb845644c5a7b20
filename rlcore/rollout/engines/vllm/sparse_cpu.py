"""Block top-k attention on the CPU: the backend of vLLM, the plan of an engine step, made once for
all layers, and the layers' computation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from rlcore.attention.block_topk import (
    DenseSpans,
    PlannedRows,
    StepPlan,
    group_queries,
    page_summaries,
    select_pages,
    with_own_block,
)
from rlcore.attention.specs import SparseSpec
from rlcore.errors import UserError
from rlcore.rollout.engines.vllm.sparse_rule import (
    StepPlanner,
    bind_requests,
    installed_rule,
    set_rule,
)


@dataclass(frozen=True, slots=True)
class KernelRows:
    """Rows of one call of the stock kernel."""

    query_start: torch.Tensor  # [rows + 1] int32
    seq_lens: torch.Tensor  # [rows] int32
    schedule: torch.Tensor  # how the kernel splits them over threads
    # [tokens * kv_heads] int64, the places of (token, head) in the order of row, head, token; None:
    # they are in it
    order: torch.Tensor | None = None


@dataclass
class SparseCPUMetadata(CPUAttentionMetadata):
    """vLLM's metadata, and the step's plan with what the kernel needs for its two parts."""

    plan: StepPlan | None = None  # None: the budget covers every possible context
    dense_rows: KernelRows | None = None  # both are set when the plan has both parts
    sparse_rows: KernelRows | None = None  # one row for each planned row and KV head


class SparseCPUBuilder(StepPlanner, CPUAttentionMetadataBuilder):
    """Plans each step once for all layers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.take_rule(self.block_size)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SparseCPUMetadata:
        common = common_attn_metadata
        stock = super().build(common_prefix_len, common, fast_build)
        md = SparseCPUMetadata(**vars(stock))
        max_len = self.vllm_config.model_config.max_model_len
        if self.rule.dense_positions >= max_len and not self.moves:
            return md  # nothing is ever sparse
        md.plan = self.plan(
            common.query_start_loc, common.seq_lens, common.num_reqs, common.req_idx
        )
        if md.plan.sparse is None:
            return md
        if (dense := md.plan.dense) is not None:
            md.dense_rows = self._rows(
                dense.query_start, dense.seq_lens, self.num_heads, self.num_kv_heads
            )
        # A row of the stock kernel for each KV head, so that heads may keep different pages.
        h, together = self.num_kv_heads, md.plan.sparse.together
        lens = md.plan.sparse.kept_len.repeat_interleave(h)
        starts, order = torch.arange(len(lens) + 1, dtype=torch.int32), None
        if together is not None:
            starts[1:] = together.bounds.diff().repeat_interleave(h).cumsum(0)
            order = together.by_head(h)
        rows = self._rows(starts, lens, self.num_heads // h, 1)
        md.sparse_rows = replace(rows, order=order)
        return md

    def _rows(
        self, query_start: torch.Tensor, seq_lens: torch.Tensor, heads: int, kv_heads: int
    ) -> KernelRows:
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(seq_lens),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=self.head_dim,
            seq_lens=seq_lens,
            dtype=cast(torch.dtype, self.dtype),
            query_start_loc=query_start,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        return KernelRows(query_start, seq_lens, schedule)


ROW_CHUNK = 1024  # tokens whose scores exist at one time
# Summaries gathered at one time: beyond what the caches hold, request by request is faster.
GATHER_BYTES = 4 << 20


# Block top-k attention on the CPU: one layer.
#
# Cache layout per layer: [blocks, kv_heads, block_size, 2 * head_dim], keys first and stored
# transposed ([head_dim, block_size]) within their half. Beside it each layer keeps the mean key of
# every physical page, written when the page's last key is: a page that the prefix cache gives to
# another request brings its summary along, one that is recomputed is summarised again. Pages chosen
# for a KV head become a row of the stock kernel with a shortened block table; keys are stored after
# RoPE, so a page means the same at any place in the table.


class SparseCPUImpl(CPUAttentionBackendImpl):
    """Page summaries next to the layer's cache, selection per KV head, the stock kernel on the kept
    pages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plain = (
            self.attn_type == AttentionType.DECODER
            and self.sliding_window == -1
            and self.alibi_slopes is None
        )
        if not plain or self.sinks is not None or self.is_fp8_kv_cache:
            raise UserError(
                "actor.kind=sparse on the CPU needs a decoder with full attention and an "
                "unquantised KV cache: no sliding window, ALiBi or attention sinks, "
                "actor.fp8_kv_cache=false."
            )
        # [blocks, kv_heads, head_dim] float32, made with the cache; and of the same shape, where
        # prompts choose by blocks, the query of each page's first position
        self.summaries = torch.empty(0)
        self.choosing = torch.empty(0)

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        if len(self.summaries) != len(kv_cache):
            blocks, heads = kv_cache.shape[:2]
            self.summaries = torch.zeros(blocks, heads, self.head_size)
            if installed_rule().prompt == "block":
                self.choosing = torch.zeros(blocks, heads, self.head_size)
            self._check_layout(layer, key, kv_cache, slot_mapping)

    def _check_layout(
        self, layer: Any, key: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Raise RuntimeError if the kernel stored a key elsewhere than `_keys` reads it.

        The layout is not part of vLLM's interface, so it is checked once, on the first key written.
        """
        written = (slot_mapping >= 0).nonzero()[:1, 0]
        if not len(written):
            return
        heads, size = kv_cache.shape[1:3]
        slot = int(slot_mapping[written])
        held = _keys(kv_cache, torch.tensor([slot // size]))[0, :, slot % size]
        if not torch.equal(held, key[written].view(heads, -1)):
            raise RuntimeError(f"vLLM's CPU cache has an unknown layout of keys (isa {layer.isa})")

    # vLLM's interface fixes the parameters.
    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        md = attn_metadata
        if isinstance(md, SparseCPUMetadata) and md.plan is not None:
            # the summaries of the pages that this step completes
            if len(md.plan.done_requests):
                blocks = md.block_table[md.plan.done_requests, md.plan.done_pages].long()
                self.summaries[blocks] = page_summaries(_keys(kv_cache, blocks))
            if md.plan.sparse is not None:
                if md.plan.dense is not None:
                    self._dense(layer, query, kv_cache, md, md.plan.dense, output)
                self._sparse(layer, query, kv_cache, md, md.plan.sparse, output)
                return output
        return super().forward(
            layer, query, key, value, kv_cache, md, output, output_scale, output_block_scale
        )

    def _dense(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        md: SparseCPUMetadata,
        spans: DenseSpans,
        output: torch.Tensor,
    ) -> None:
        if spans.tokens is None or md.dense_rows is None:
            raise RuntimeError("a step with rows of both kinds lacks its dense part")
        q = query.index_select(0, spans.tokens)
        out = torch.empty_like(q)
        table = md.block_table.index_select(0, spans.requests)
        self._kernel(layer, q, kv_cache, out, table, md.dense_rows)
        output.index_copy_(0, spans.tokens, out)

    def _sparse(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        md: SparseCPUMetadata,
        rows: PlannedRows,
        output: torch.Tensor,
    ) -> None:
        if md.sparse_rows is None:
            raise RuntimeError("a step with sparse rows was not scheduled for the kernel")
        blocks, heads, size, width = kv_cache.shape
        together, n = rows.together, len(rows.requests)
        count = n if together is None else int(together.bounds[-1])
        q = query[:count] if rows.tokens is None else query.index_select(0, rows.tokens)
        if together is None:
            asked = group_queries(q, heads)
        else:
            chosen = md.block_table[rows.requests, together.first.clamp(min=0)].long()
            asked = together.queries(q, self.choosing, chosen)
        table = self._select(asked, md.block_table, rows)
        # head h of block b is block b * heads + h of the view below
        table += torch.arange(heads)[:, None]
        per_head = q.reshape(count * heads, -1, self.head_size)
        order = md.sparse_rows.order
        per_head = per_head if order is None else per_head.index_select(0, order)
        out = torch.empty_like(per_head)
        cache = kv_cache.view(blocks * heads, 1, size, width)
        self._kernel(layer, per_head, cache, out, table.view(n * heads, -1).int(), md.sparse_rows)
        out = out if order is None else torch.empty_like(out).index_copy_(0, order, out)
        out = out.view(count, *output.shape[1:])
        if rows.tokens is None:
            output[:count] = out
        else:
            output.index_copy_(0, rows.tokens, out)

    def _select(
        self, query: torch.Tensor, block_table: torch.Tensor, rows: PlannedRows
    ) -> torch.Tensor:
        """Kept pages of every row and KV head: query [n, kv_heads, D] -> block * kv_heads [n,
        kv_heads, width]."""
        n, heads, _ = query.shape
        chosen = torch.empty(n, heads, rows.width, dtype=torch.int64)
        table = block_table[:, : rows.max_pages].long()
        scores = self._decode_scores(query, table, rows)
        for a in range(0, n, ROW_CHUNK):
            z = min(n, a + ROW_CHUNK)
            part = self._span_scores(query, table, rows, a, z) if scores is None else scores[a:z]
            if rows.together is not None:
                part = with_own_block(part, rows.together.first[a:z, None])
            kept = select_pages(part, rows.pages[a:z, None], rows.budget[a:z, None], rows.width)
            # Padding must be a valid index, but is never read: the row's length ends before it.
            kept.clamp_(max=rows.max_pages - 1)
            physical = table.index_select(0, rows.requests[a:z])[:, None].expand(-1, heads, -1)
            torch.gather(physical, 2, kept, out=chosen[a:z])
        return chosen.mul_(heads)

    def _decode_scores(
        self, query: torch.Tensor, table: torch.Tensor, rows: PlannedRows
    ) -> torch.Tensor | None:
        """All rows at once if each is its request's only one and the gathered summaries are small;
        otherwise None."""
        n, heads, dim = query.shape
        if len(rows.spans) < n or n * rows.max_pages * heads * dim * 4 > GATHER_BYTES:
            return None
        flat = table.index_select(0, rows.requests)[:, None] * heads + torch.arange(heads)[:, None]
        found = (
            self.summaries.view(-1, dim).index_select(0, flat.reshape(-1)).view(n * heads, -1, dim)
        )
        return torch.bmm(query.reshape(n * heads, 1, dim), found.transpose(1, 2)).view(n, heads, -1)

    def _span_scores(
        self, query: torch.Tensor, table: torch.Tensor, rows: PlannedRows, a: int, z: int
    ) -> torch.Tensor:
        """Scores of rows a..z-1, request by request so that each gathers its pages once: [z - a,
        kv_heads, max_pages]."""
        scores = torch.zeros(z - a, query.shape[1], rows.max_pages)
        for request, first, end, pages in rows.spans:
            first, end = max(first, a), min(end, z)
            if first < end:
                found = self.summaries.index_select(0, table[request, :pages])
                part = torch.bmm(query[first:end].transpose(0, 1), found.permute(1, 2, 0))
                scores[first - a : end - a, :, :pages] = part.transpose(0, 1)
        return scores

    def _kernel(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        block_table: torch.Tensor,
        rows: KernelRows,
    ) -> None:
        blocks, heads, size, _ = kv_cache.shape
        key_cache, value_cache = kv_cache.view(blocks, heads, size * 2, -1).chunk(2, dim=2)
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            output=output,
            query_start_loc=rows.query_start,
            seq_lens=rows.seq_lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=block_table,
            softcap=self.logits_soft_cap,
            scheduler_metadata=rows.schedule,
            s_aux=None,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )


def _keys(kv_cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """A copy of the keys of physical pages: kv_cache [blocks, kv_heads, size, 2 * D] -> [n,
    kv_heads, size, D]."""
    count, heads, size, width = kv_cache.shape
    key_half = kv_cache.view(count, heads, size * width).narrow(2, 0, size * width // 2)
    return (
        key_half.index_select(0, blocks).view(len(blocks), heads, width // 2, size).transpose(2, 3)
    )


# Block top-k sparse attention inside vLLM on the CPU, in place of its stock attention backend.
#
# install(SparseSpec(...))         # before the engine starts, in the process that hosts the model
# engine = ...                     # with block_size=rule.block_size
# bind(worker.model_runner)        # once it has started


def install(rule: SparseSpec) -> None:
    """Make engines that start later in this process attend by `rule`.

    Raises UserError for a page size that vLLM lacks.
    """
    set_rule(rule, kernel="vLLM's CPU kernel")
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.SparseCPUBackend")


def bind(model_runner: Any) -> None:
    """Let the started engine's attention see its requests' prompt lengths and page rules, which
    `prompt` other than sparse and `blocks_by_length` need.

    Raises RuntimeError if the engine attends otherwise: call it always, to check that `install`
    came in time.
    """
    bind_requests(model_runner, SparseCPUBuilder)


class SparseCPUBackend(CPUAttentionBackend):
    """The stock CPU backend with pages of any multiple of 16 tokens and our builder and layer."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [installed_rule().block_size]

    @staticmethod
    def get_impl_cls() -> type[SparseCPUImpl]:
        return SparseCPUImpl

    @staticmethod
    def get_builder_cls() -> type[SparseCPUBuilder]:
        return SparseCPUBuilder
