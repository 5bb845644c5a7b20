"""vLLM's engine arguments of an `EngineJob`, and the errors that they add to an actor's logits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from rlcore.models.folder import is_recurrent, read_config
from rlcore.rollout.engines.vllm.worker_side import BACKENDS, LOAD_FORMAT, WorkerSide
from rlcore.rollout.specs import ActorSpec, EngineJob
from rlcore.seeding import derive_seed


def quantization_options(actor: ActorSpec) -> dict[str, Any]:
    """Engine arguments for FP8 W8A8 with dynamic activation scales; none for other actors.

    Layers whose name contains one of `keep_high_precision` stay as they are, as in the emulation.
    vLLM refuses a pattern that matches only part of a layer that it fuses (q, k, v; gate, up).
    """
    if not actor.quantised_by_engine:
        return {}
    ignored = [f"*{pattern}*" for pattern in actor.keep_high_precision]
    return {
        "quantization": f"fp8_per_{actor.scales}",
        "quantization_config": {"ignore": ignored},
    }


# ranks that vLLM's buffers of an adapter can have (vllm/config/lora.py: MaxLoRARanks)
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@contextmanager
def adapter_folder(tensors: Mapping[str, torch.Tensor], rank: int) -> Iterator[str]:
    """A PEFT folder with these factors (`weights/adapters.py`), for processes on this machine."""
    with TemporaryDirectory(prefix="rlcore-adapter-") as folder:
        named = {f"base_model.model.{n}": t.contiguous() for n, t in tensors.items()}
        save_file(named, str(Path(folder) / "adapter_model.safetensors"))
        modules = sorted({n.split(".lora_")[0].rpartition(".")[2] for n in tensors})
        # alpha = rank: B has the scale already
        config = {"r": rank, "lora_alpha": rank, "target_modules": modules, "peft_type": "LORA"}
        (Path(folder) / "adapter_config.json").write_text(json.dumps(config))
        yield folder


_SMALLEST_STEP = 2048  # tokens of an engine step, unless one sequence or the batch needs more


def engine_args(job: EngineJob, vocab: int) -> EngineArgs:
    """vLLM's arguments for this job; `vocab`: rows of its embedding."""
    actor = job.actor
    return EngineArgs(
        model=job.model_path,
        dtype=getattr(torch, actor.compute_dtype),
        max_model_len=job.max_len,
        max_num_seqs=actor.max_num_seqs,
        max_num_batched_tokens=actor.max_batched_tokens
        or max(_SMALLEST_STEP, job.max_len, actor.max_num_seqs * _tokens_a_step(actor)),
        enforce_eager=actor.eager,
        enable_prefix_caching=actor.prefix_caching and not _recurrent_on_cpu(job),
        max_logprobs=max(1, min(job.logprobs_k, vocab)),
        kv_cache_dtype="fp8" if actor.fp8_kv_cache else "auto",
        gpu_memory_utilization=_memory_share(actor),
        load_format=LOAD_FORMAT,
        tensor_parallel_size=actor.tensor_parallel,
        distributed_executor_backend="uni" if actor.tensor_parallel == 1 else "mp",
        logprobs_mode="processed_logprobs",
        generation_config="vllm",  # the folder's own would change what is sampled
        async_scheduling=actor.schedules_ahead,
        disable_log_stats=True,
        worker_extension_cls=f"{WorkerSide.__module__}.{WorkerSide.__name__}",
        seed=0,  # requests have seeds of their own
        enable_sleep_mode=job.sleeps and not actor.on_cpu,
        **_transfer_options(job),
        **_adapter_options(job),
        **quantization_options(actor),
        hf_overrides=_overrides(job),
        **_cpu_options(actor),
        **_sparse_options(actor),
        **_speculation_options(actor),
        logits_processors=processors(actor),
        additional_config=_own_config(job),
        **_expert_options(job),
    )


def _overrides(job: EngineJob) -> dict[str, Any]:
    """Entries of the model's own configuration that vLLM reads: the head's dtype, and widths that
    LFM2's checkpoints have and transformers does not write."""
    config = read_config(job.model_path)
    widths = ("conv_dim", "block_dim") if config.get("model_type") == "lfm2" else ()
    found = {n: config.get(n, config["hidden_size"]) for n in widths}
    return found | ({"head_dtype": "float32"} if job.actor.fp32_head else {})


def _recurrent_on_cpu(job: EngineJob) -> bool:
    """Return whether states could be kept for a prefix only by cutting prompts (`_cpu_options`)."""
    return job.actor.on_cpu and is_recurrent(read_config(job.model_path))


def _tokens_a_step(actor: ActorSpec) -> int:
    """Tokens that one decoding request may have in a step: its own, what is proposed, and a slot of
    the proposing model (vLLM's `max_num_new_slots_for_drafting`)."""
    return 1 if actor.speculate is None else 2 + actor.speculate.tokens


def _speculation_options(actor: ActorSpec) -> dict[str, Any]:
    """A model that proposes its likeliest tokens: vLLM would draw them without a request's seed."""
    if actor.speculate is None:
        return {}
    proposing = {
        "method": "draft_model",
        "model": actor.speculate.path,
        "num_speculative_tokens": actor.speculate.tokens,
        "draft_sample_method": "greedy",
    }
    return {"speculative_config": proposing}


def _memory_share(actor: ActorSpec) -> float:
    """The share of GPU memory that vLLM plans with. Its plan leaves out the summaries of a sparse
    actor's pages, one key for each page of keys and values, and where prompts choose by blocks the
    queries that chose."""
    if actor.sparse is None:
        return actor.gpu_memory_utilization
    beside = 2 if actor.sparse.prompt == "block" else 1
    return actor.gpu_memory_utilization / (1 + beside / (2 * actor.sparse.block_size))


def _transfer_options(job: EngineJob) -> dict[str, Any]:
    if job.transfer is None:
        return {}
    return {"weight_transfer_config": WeightTransferConfig(backend=BACKENDS[job.transfer])}


def _adapter_options(job: EngineJob) -> dict[str, Any]:
    """Buffers for one adapter, which is replaced in place by every publication."""
    if job.adapter is None:
        return {}
    return {
        "enable_lora": True,
        "max_loras": 1,
        # the smallest of vLLM's ranks that holds this adapter
        "max_lora_rank": min(r for r in RANKS if r >= job.adapter.rank),
        "lora_target_modules": [t.rpartition(".")[2] for t in job.adapter.targets],
    }


def _cpu_options(actor: ActorSpec) -> dict[str, Any]:
    if not actor.on_cpu:
        return {}
    return {
        # A prompt cut into chunks draws once too often from its seeded generator, and vLLM can
        # rewind only GPU ones.
        "enable_chunked_prefill": False,
        "kv_cache_memory_bytes": int(actor.kv_cache_gib * 2**30),
    }


def _sparse_options(actor: ActorSpec) -> dict[str, Any]:
    """The rule's pages, and the backend that ours replaces: on some GPUs vLLM prefers another."""
    if actor.sparse is None:
        return {}
    options: dict[str, Any] = {"block_size": actor.sparse.block_size}
    if not actor.on_cpu:
        options["attention_backend"] = "FLASH_ATTN"
    return options


def _expert_options(job: EngineJob) -> dict[str, Any]:
    """Options for mixtures of experts, which other models ignore. Triton's kernels read w13 and w2
    as they were loaded. Other kernels swap the halves of w13 or store both in blocks, so that
    weights could not be replaced in place.
    """
    if job.actor.on_cpu:
        return {}
    return {"moe_backend": "triton", "enable_return_routed_experts": job.routes}


def _own_config(job: EngineJob) -> dict[str, Any]:
    """Read in the engine's workers by the processors below and by `FolderLoader`."""
    config: dict[str, Any] = {}
    actor = job.actor
    if actor.logit_noise:
        config["logit_noise"] = actor.logit_noise
    if actor.probability_floor:
        config["probability_floor"] = actor.probability_floor
    if actor.on_cpu:
        config["cpu_fast_paths"] = job.cpu_fast_paths
    return config


# Errors on an actor's logits, to study mismatch: noise, and a floor of probabilities.


def processors(actor: ActorSpec) -> list[str | type[LogitsProcessor]] | None:
    """The errors that an actor's settings ask for, in the order in which they are applied."""
    noise = [NoiseProcessor] if actor.logit_noise else []
    floor = [FloorProcessor] if actor.probability_floor else []
    return [*noise, *floor] or None


class NoiseProcessor(LogitsProcessor):
    """Gaussian noise of `additional_config["logit_noise"]`; the processed log-probs include it.

    The noise depends on (request seed, position) alone, not on the batch or a recomputation.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._std = float(vllm_config.additional_config["logit_noise"])
        # batch row -> (request seed, its output tokens so far)
        self._rows: dict[int, tuple[int, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(
            self._rows, batch_update, lambda params, _, out: (int(params.seed or 0), out)
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator()
        for row, (seed, output) in self._rows.items():
            generator.manual_seed(derive_seed(seed, "rollout/logit_noise", len(output)))
            noise = torch.randn(logits.shape[1], generator=generator)
            logits[row] += self._std * noise.to(logits.device, logits.dtype)
        return logits


class FloorProcessor(LogitsProcessor):
    """The floor e of `additional_config["probability_floor"]` under every token's probability.

    p_inf = (p + e)/(1 + V e) with p the distribution over all V tokens at the request's
    temperature. Top-p, top-k and min-p are applied to p_inf afterwards, as in an engine whose
    softmax has a floor; the processed log-probs include all of them.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._floor = float(vllm_config.additional_config["probability_floor"])
        self._temperatures: dict[int, float] = {}  # by batch row

    def is_argmax_invariant(self) -> bool:
        return False  # it is, but vLLM applies such processors after min-p

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(
            self._temperatures,
            batch_update,
            lambda params, *_: params.temperature or 1.0,  # greedy: the order alone counts
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        values = [self._temperatures.get(row, 1.0) for row in range(len(logits))]
        at = torch.tensor(values, device=logits.device, dtype=torch.float32)[:, None]
        # vLLM divides by the temperature next
        floored = at * ((logits.float() / at).softmax(-1) + self._floor).log()
        return floored.to(logits.dtype)
