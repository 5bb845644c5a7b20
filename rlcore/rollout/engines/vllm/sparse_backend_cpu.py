"""Block top-k sparse attention inside vLLM on the CPU, in place of its stock attention backend.

install(SparseSpec(...))         # before the engine starts, in the process that hosts the model
engine = ...                     # with block_size=rule.block_size
bind(worker.model_runner)        # once it has started
"""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from rlcore.attention.specs import SparseSpec
from rlcore.rollout.engines.vllm.prompt_lengths import bind_prompt_lengths
from rlcore.rollout.engines.vllm.sparse_layer_cpu import SparseCPUImpl
from rlcore.rollout.engines.vllm.sparse_metadata_cpu import SparseCPUBuilder
from rlcore.rollout.engines.vllm.sparse_rule import installed_rule, set_rule


def install(rule: SparseSpec) -> None:
    """Make engines that start later in this process attend by `rule`.

    Raises UserError for a page size that vLLM lacks.
    """
    set_rule(rule, kernel="vLLM's CPU kernel")
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.SparseCPUBackend")


def bind(model_runner: Any) -> None:
    """Let the started engine's attention see its requests' prompt lengths, which
    `sparse_prompt=False` needs.

    Raises RuntimeError if the engine attends otherwise: call it always, to check that `install`
    came in time.
    """
    bind_prompt_lengths(model_runner, SparseCPUBuilder)


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
