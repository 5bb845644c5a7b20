"""Rates of GPUs by the cost model of DistillSparse, appendix B: decoding reads weights and keys,
and computes 2 FLOPs a parameter and token; the two add up.

Bandwidth and FLOPs are the manufacturers' dense figures. The shares of them that programs reach are
assumptions, which a measurement replaces (`rates=FILE`): no rate here was measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlcore.advisor.planner.specs import ActorRates, LearnerRates
from rlcore.config.parts.part_facts import NO_WORK, Work
from rlcore.metrics.limit import PASS, TRAINED

GB, TERA = 1e9, 1e12
BANDWIDTH_REACHED = 0.7  # of decoding
PREFILL_REACHED = 0.5  # of the FLOPs, prompts
DECODE_REACHED = 0.3  # of the FLOPs, decoding in batches
TRAIN_REACHED = 0.30  # of the FLOPs, forward and backward: layers are eager
LINK_REACHED = 0.7
STEP_S = 0.002  # of a decode step besides the card's work: scheduling, sampling
LAUNCH_S = 0.05  # of an optimizer step beside its tokens


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card. Example: Gpu(80, 3350, 989, 1979, 50)"""

    memory_gib: float
    bandwidth: float  # GB/s of its memory
    bf16: float  # TFLOP/s
    fp8: float  # TFLOP/s; 0: has none
    link: float  # GB/s to other nodes, a card


GPUS = {
    "a100": Gpu(80, 2039, 312, 0, 25),
    "h100": Gpu(80, 3350, 989, 1979, 50),
    "h200": Gpu(141, 4800, 989, 1979, 50),
    "b200": Gpu(180, 7700, 2250, 4500, 50),
    "l40s": Gpu(48, 864, 362, 733, 12.5),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense model. Example: Shape(8.2e9, layers=36, kv_heads=8, head_dim=128)"""

    parameters: float
    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Mapping[str, Any], parameters: float) -> Shape:
        """The shape that a folder's config.json states."""
        heads = int(config["num_attention_heads"])
        head_dim = config.get("head_dim") or int(config["hidden_size"]) // heads
        kv_heads = config.get("num_key_value_heads") or heads
        return cls(parameters, int(config["num_hidden_layers"]), int(kv_heads), int(head_dim))

    def kv_bytes(self, each: int) -> int:
        """Keys and values of one token, `each` bytes an element."""
        return 2 * self.layers * self.kv_heads * self.head_dim * each


SHAPES = {
    "qwen3-1.7b": Shape(1.7e9, 28, 8, 128),
    "qwen3-4b": Shape(4.0e9, 36, 8, 128),
    "qwen3-8b": Shape(8.2e9, 36, 8, 128),
    "qwen3-14b": Shape(14.8e9, 40, 8, 128),
    "qwen3-32b": Shape(32.8e9, 64, 8, 128),
}


@dataclass(frozen=True, slots=True)
class EngineShape:
    """How an engine runs a model. Example: EngineShape(gpus=2, fp8=True)"""

    gpus: int = 1  # that share the model
    fp8: bool = False
    fp8_kv: bool = False
    budget: int | None = None  # tokens of a context that sparse attention reads
    memory_share: float = 0.85
    max_running: int = 256


def actor_rates(gpu: Gpu, shape: Shape, engine: EngineShape, *, context: float) -> ActorRates:
    """Rates of one engine whose requests have `context` tokens on average.

    Raises ValueError if model and one request do not fit.
    """
    weights = shape.parameters * (1 if engine.fp8 else 2)
    kv = shape.kv_bytes(1 if engine.fp8_kv else 2)
    free = engine.gpus * gpu.memory_gib * 2**30 * engine.memory_share - weights
    fits = int(free // (kv * context))
    if fits < 1:
        raise ValueError(
            f"{shape.parameters / 1e9:.1f} B parameters and a request of {context:.0f} tokens do "
            f"not fit {engine.gpus} GPUs of {gpu.memory_gib:g} GiB"
        )
    flops = engine.gpus * TERA * (gpu.fp8 if engine.fp8 and gpu.fp8 else gpu.bf16)
    bytes_per_s = engine.gpus * GB * gpu.bandwidth * BANDWIDTH_REACHED
    return ActorRates(
        decode_s=STEP_S + weights / bytes_per_s,
        decode_request_s=PASS * shape.parameters / (flops * DECODE_REACHED),
        decode_context_s=kv / bytes_per_s,
        context_budget=engine.budget,
        prefill_tokens_per_s=flops * PREFILL_REACHED / (PASS * shape.parameters),
        load_s=0.2 + 2 * shape.parameters / (gpu.link * GB * LINK_REACHED * engine.gpus),
        max_running=min(engine.max_running, fits),
    )


def learner_rates(gpu: Gpu, shape: Shape, gpus: int, beside: Work = NO_WORK) -> LearnerRates:
    """Rates of all ranks together, one on each of `gpus`: 6 FLOPs a parameter and token, 2 for a
    pass without gradient."""
    flops = gpus * TERA * gpu.bf16 * TRAIN_REACHED
    states = 16 * (shape.parameters + beside.trained)
    return LearnerRates(
        step_s=LAUNCH_S + states / (gpus * GB * gpu.bandwidth * BANDWIDTH_REACHED),
        token_s=(TRAINED * shape.parameters + beside.step_flops) / flops,
        ref_token_s=PASS * shape.parameters / flops,
        phase_token_s=beside.phase_flops / flops,
        publish_s=0.2 + 2 * shape.parameters / (gpu.link * GB * LINK_REACHED * gpus),
    )
