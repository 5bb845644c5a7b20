"""Block top-k sparse attention inside vLLM on CUDA, in place of its FlashAttention backend.

It ran on an H100 with the locked versions (`benchmarks/results/gpu_h100.md`); what is unproven
there is said below. `benchmarks/gpu/check.py` checks it against a reference and dense attention.

    install(SparseSpec(...))         # before the engine starts, in the process that hosts the model
    engine = ...                     # with block_size=rule.block_size
    bind(worker.model_runner)        # once it has started

The cache is asked for head-major ([blocks, kv_heads, block_size, 2 * head_dim]). So block and head
are adjacent, and the pages kept for a KV head are a row of FlashAttention's block table over
`blocks * kv_heads` one-headed blocks.

A decode step has fixed shapes, no synchronisation and no host data, so it can be captured in a CUDA
graph. What changes from step to step is written into memory whose address stays
(`sparse_rows_gpu.DecodeBuffers`). A page is summarised by the step that completes it. Steps with
several tokens a request are planned on the host and run eagerly. Each token is a row with its own
pages, also in prompts and recomputed prefixes. The learner's forward attends by the rule there, and
a dense prefill would give other keys and values from the second layer on. With `prompt=block` the
tokens of a prompt's block are one row.

The host says what a decode step cannot see. One is whether it has the one token of a prompt that
the prefix cache leaves over. That token attends otherwise where `prompt` is not sparse and then
leaves the graph (`SlotRequests.keep_prompts_apart`; vLLM's first runner captures no such rule). The
other is the budgets of requests that bring their own pages. **Unproven on a GPU**: such steps
inside graphs; on an H100 they ran outside them, in 22 ms instead of 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides, is_quantized_kv_cache
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from rlcore.attention.block_topk import StepPlan
from rlcore.attention.specs import SparseSpec
from rlcore.errors import UserError
from rlcore.rollout.engines.vllm.sparse_kernel_gpu import select_blocks, summarise_blocks
from rlcore.rollout.engines.vllm.sparse_rows_gpu import (
    DecodeBuffers,
    Dense,
    Rows,
    attend_dense,
    attend_rows,
    attend_together,
    mixed_rows,
)
from rlcore.rollout.engines.vllm.sparse_rule import (
    StepPlanner,
    bind_requests,
    installed_rule,
    set_rule,
)


def install(rule: SparseSpec) -> None:
    """Make engines that start later in this process attend by `rule`.

    Raises UserError for a page size that vLLM lacks.
    """
    set_rule(rule, kernel="FlashAttention")
    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.SparseGPUBackend")


def bind(model_runner: Any) -> None:
    """See `sparse_cpu.bind`."""
    bind_requests(model_runner, SparseGPUBuilder)


@dataclass
class SparseGPUMetadata(FlashAttentionMetadata):
    """vLLM's metadata with the step's two kinds of rows and the pages to summarise."""

    rows: Rows | None = None
    dense: Dense | None = None
    # [C] int64, physical blocks, 0 for none; None: the budget covers every context
    summarise: torch.Tensor | None = None


class SparseGPUBuilder(StepPlanner, FlashAttentionMetadataBuilder):
    """Plans each step once for all layers."""

    supports_update_block_table: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.take_rule(self.block_size)
        config = self.vllm_config
        pages = -(-config.model_config.max_model_len // self.rule.block_size)
        # a graph may be captured for more rows than requests can run
        captured = config.compilation_config.max_cudagraph_capture_size or 0
        rows = max(config.scheduler_config.max_num_seqs, captured)
        self._decode = DecodeBuffers(self.rule, rows, pages, self.device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        # vLLM 0.26 has no such property
        apart = bool(getattr(vllm_config, "use_v2_model_runner", False))
        if installed_rule().needs_prompts and not apart:
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SparseGPUMetadata:
        md = SparseGPUMetadata(
            **vars(super().build(common_prefix_len, common_attn_metadata, fast_build))
        )
        max_len = self.vllm_config.model_config.max_model_len
        if self.rule.dense_positions >= max_len and not self.moves:
            return md
        decode, budget = md.max_query_len == 1, None
        if decode and not self.plain:
            lengths, slots = self._on_host(common_attn_metadata)
            decode, budget = self.decode_step(lengths, common_attn_metadata.num_reqs, slots)
        if decode:
            md.rows, md.summarise = self._decode.fill(md.seq_lens, md.block_table, budget)
        else:
            plan = self._plan_on_host(common_attn_metadata)
            md.rows, md.dense, md.summarise = mixed_rows(plan, md.block_table)
        return md

    def _on_host(self, common: CommonAttentionMetadata) -> tuple[torch.Tensor, Any]:
        """Lengths and requests' places. Upper bounds of lengths are exact without speculative
        decoding."""
        if common.seq_lens_cpu_upper_bound is None:
            raise RuntimeError("sparse attention needs lengths on the host, and vLLM gave none")
        # vLLM 0.26 has no such field
        return common.seq_lens_cpu_upper_bound, getattr(common, "req_idx", None)

    def _plan_on_host(self, common: CommonAttentionMetadata) -> StepPlan:
        lengths, slots = self._on_host(common)
        return self.plan(common.query_start_loc_cpu, lengths, common.num_reqs, slots)


class SparseGPUImpl(FlashAttentionImpl):
    """One layer: page summaries next to its cache, selection per KV head, FlashAttention on the
    kept pages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plain = (
            self.attn_type == AttentionType.DECODER
            and self.alibi_slopes is None
            and self.sinks is None
        )
        window = self.sliding_window not in (None, (-1, -1))
        if not plain or window or is_quantized_kv_cache(self.kv_cache_dtype):
            raise UserError(
                "actor.kind=sparse needs a decoder with full attention and an unquantised KV "
                "cache: no sliding window, ALiBi or attention sinks, actor.fp8_kv_cache=false."
            )
        # [blocks, kv_heads, head_dim] of the cache's dtype, made with it; and of the same shape,
        # where prompts choose by blocks, the query of each page's first position
        self.summaries = torch.empty(0)
        self.choosing = torch.empty(0)

    # vLLM's interface fixes the parameters.
    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        md = attn_metadata
        if not isinstance(md, SparseGPUMetadata) or md.summarise is None:
            return super().forward(
                layer, query, key, value, kv_cache, md, output, output_scale, output_block_scale
            )
        if self.dcp_world_size > 1:
            raise RuntimeError(
                "block top-k attention does not work with decode context parallelism"
            )
        if len(self.summaries) != len(kv_cache):
            self._make_summaries(kv_cache)
        summarise_blocks(kv_cache, self.summaries, md.summarise)
        if md.rows is None:
            return super().forward(
                layer, query, key, value, kv_cache, md, output, output_scale, output_block_scale
            )
        if md.dense is not None:
            attend_dense(query, kv_cache, md.block_table, md.dense, output, self._flash)
        if md.rows.together is not None:
            kept = (self.summaries, self.choosing)
            attend_together(query, kv_cache, kept, md.block_table, md.rows, output, self._flash)
            return output
        attend_rows(
            query,
            kv_cache,
            self.summaries,
            md.block_table,
            md.rows,
            output,
            self._flash,
            select_blocks,
        )
        return output

    def _make_summaries(self, kv_cache: torch.Tensor) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "page summaries must exist before a CUDA graph is captured: no eager step came "
                "first"
            )
        blocks, heads, _, width = kv_cache.shape
        if kv_cache.stride(0) != heads * kv_cache.stride(1):
            raise RuntimeError(
                f"the KV cache is not head-major: shape {kv_cache.shape}, strides "
                f"{kv_cache.stride()}"
            )
        self.summaries = torch.zeros(
            blocks, heads, width // 2, dtype=kv_cache.dtype, device=kv_cache.device
        )
        if installed_rule().prompt == "block":
            self.choosing = torch.zeros_like(self.summaries)

    # `sparse_rows_gpu.Flash`: the parameters are FlashAttention's.
    def _flash(
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
    ) -> None:
        fa_utils.flash_attn_varlen_func(
            q=query,
            k=canonicalize_singleton_dim_strides(key_cache),  # FA3's TMA needs regular strides
            v=canonicalize_singleton_dim_strides(value_cache),
            out=out,
            cu_seqlens_q=query_start,
            max_seqlen_q=max_query,
            seqused_k=seq_lens,
            max_seqlen_k=max_seq,
            softmax_scale=self.scale,
            causal=True,
            softcap=self.logits_soft_cap,
            block_table=block_table,
            fa_version=cast(int, self.vllm_flash_attn_version),
            # 0 lets the kernel choose by lengths, which a captured graph cannot do
            num_splits=1 if max_query == 1 else 0,
        )


class SparseGPUBackend(FlashAttentionBackend):
    """FlashAttention with a head-major cache and the classes above."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        from vllm.v1.kv_cache_interface import KVCacheLayout  # vLLM 0.26 has none

        return (KVCacheLayout.LBHNC,)

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        """Return the same order by the name that vLLM 0.26 asks for instead."""
        return "HND"

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [installed_rule().block_size]

    @staticmethod
    def get_impl_cls() -> type[SparseGPUImpl]:
        return SparseGPUImpl

    @staticmethod
    def get_builder_cls() -> type[SparseGPUBuilder]:
        return SparseGPUBuilder
