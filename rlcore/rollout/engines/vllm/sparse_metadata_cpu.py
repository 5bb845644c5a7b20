"""Block top-k attention on the CPU: what each engine step is planned as, once for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, CPUAttentionMetadataBuilder

from rlcore.attention.step_plan import StepPlan
from rlcore.rollout.engines.vllm.sparse_rule import StepPlanner


@dataclass(frozen=True, slots=True)
class KernelRows:
    """Rows of one call of the stock kernel."""

    query_start: torch.Tensor  # [rows + 1] int32
    seq_lens: torch.Tensor  # [rows] int32
    schedule: torch.Tensor  # how the kernel splits them over threads


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
        if self.rule.dense_positions >= self.vllm_config.model_config.max_model_len:
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
        h = self.num_kv_heads
        lens = md.plan.sparse.kept_len.repeat_interleave(h)
        md.sparse_rows = self._rows(
            torch.arange(len(lens) + 1, dtype=torch.int32), lens, self.num_heads // h, 1
        )
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
