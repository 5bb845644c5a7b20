"""Every attribute of vLLM that rlcore replaces. Imports no vLLM."""

from __future__ import annotations

from typing import Any

from rlcore.patching import Patch

_LIVE = "to keep weights as they were loaded: packed ones cannot be updated in place"
_ONCE = "to compute what requests of a step have in common once"


def _patch(owner: str, name: str, why: str) -> Patch:
    # 0.32 on CPUs and GPUs; 0.26 is the newest for torch 2.11
    return Patch(f"vllm.{owner}", name, why, ("0.26.", "0.32."))


# Without these two, a reload silently leaves a tied LM head on its old copy.
ONEDNN = _patch("_custom_ops", "_supports_onednn", _LIVE)
SGL_KERNEL = _patch("model_executor.layers.utils", "check_cpu_sgl_kernel", _LIVE)
_EXPERTS = "model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts"
EXPERTS_LOADED = _patch(_EXPERTS, "process_weights_after_loading", _LIVE)
EXPERTS_APPLY = _patch(_EXPERTS, "apply", _LIVE)
LINEAR_LOADED = Patch(
    "vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", _LIVE, ("0.32.",)
)
ROTATIONS = Patch(
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding",
    "forward_cpu",
    "because its kernel takes heads that are a dimension (LFM2's) for positions",
    ("0.32.",),
)
DELTA_RULE = Patch(
    "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention",
    "cpu_gdn_attention_core",
    "because it takes bfloat16 alone",
    ("0.32.",),
)
DECAY_LOADER = Patch(
    "vllm.model_executor.layers.mamba.mamba_mixer2",
    "composed_weight_loader",
    "to know the decays that were published, of which it keeps a function",
    ("0.32.",),
)
NORM = _patch(
    "model_executor.layers.layernorm:RMSNorm",
    "forward_cpu",
    "to compute norms by vLLM's own kernels, which it leaves to compiled models",
)
MODEL_FORWARD = _patch(
    "v1.worker.gpu_model_runner:GPUModelRunner",
    "_model_forward",
    "to compute a step in fewer operations, and to record the experts that it chose",
)
_ATTENTION = "v1.attention.backends.cpu_attn:CPUAttentionBackendImpl"
ATTENTION = _patch(_ATTENTION, "forward", _ONCE)
CACHE_UPDATE = _patch(_ATTENTION, "do_kv_cache_update", _ONCE)
LOGPROBS = _patch(
    "v1.sample.sampler:Sampler", "gather_logprobs", "to leave out ranks, which nothing reads"
)
KEPT_LOGPROBS = Patch(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
    "sample",
    "to leave log-probs on the device until they are needed",
    ("0.32.",),
)
LOGITS = _patch(
    "model_executor.layers.logits_processor:LogitsProcessor",
    "forward",
    "to compute logits to the bit as a learner does",
)
DRAWS = _patch(
    "v1.sample.ops.topk_topp_sampler:TopKTopPSampler",
    "forward",
    "to draw several numbers of a request's generator together",
)
ROUTES = _patch(
    "v1.core.sched.scheduler:Scheduler", "aux_output_connector", "to return experts on the CPU"
)
SAMPLING_BY_TOKEN = _patch(
    "v1.sample.rejection_sampler",
    "expand_batch_to_tokens",
    "because on a CPU it writes temperatures, top-p and top-k into a copy and returns memory that "
    "was never written",
)
PROPOSALS = _patch(
    "v1.core.sched.scheduler:Scheduler",
    "make_spec_decoding_stats",
    "to count proposed and accepted tokens without the rest of its statistics",
)
SECOND_RUNNER_REQUESTS = _patch(
    "v1.worker.gpu.sample.sampler:Sampler", "add_request", "to note lengths of prompts"
)
SECOND_RUNNER_STEPS = Patch(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
    "gather_batch_req_state",
    "to keep tokens of prompts that attend otherwise out of the graphs of decode steps",
    ("0.32.",),
)
PATCHES = (
    ONEDNN,
    SGL_KERNEL,
    EXPERTS_LOADED,
    EXPERTS_APPLY,
    LINEAR_LOADED,
    ROTATIONS,
    DELTA_RULE,
    DECAY_LOADER,
    NORM,
    MODEL_FORWARD,
    ATTENTION,
    CACHE_UPDATE,
    LOGPROBS,
    KEPT_LOGPROBS,
    LOGITS,
    DRAWS,
    ROUTES,
    SAMPLING_BY_TOKEN,
    PROPOSALS,
    SECOND_RUNNER_REQUESTS,
    SECOND_RUNNER_STEPS,
)


def is_second(runner: Any) -> bool:
    """Return whether a model runner is vLLM's second one, which has other attributes."""
    return hasattr(runner, "req_states")
