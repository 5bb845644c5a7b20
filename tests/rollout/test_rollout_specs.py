"""Facts about vLLM that settings rely on."""

import pytest

from rlcore.rollout.engines.vllm_facts import CPU_HEADS

pytestmark = pytest.mark.engine


def test_heads_on_cpu_are_those_of_vllms_attention():
    cpu = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    assert tuple(cpu.CPUAttentionBackend.get_supported_head_sizes()) == CPU_HEADS
