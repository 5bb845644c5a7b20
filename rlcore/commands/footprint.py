"""Peak memory of a run's processes by purpose, counted from shapes without loading anything.

The learner's figures follow what DeepSpeed 0.19 allocates (`learner/engines/deepspeed.py`), and are
compared with what real ranks of small models hold in benchmarks/memory_table.py. Allocators and
libraries add to them; nothing here has been measured on a GPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlcore.learner.limits import LayerSizes, most_positions
from rlcore.learner.specs import LearnerSpec
from rlcore.rollout.specs import ActorSpec

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}
BUCKET = 5e8  # entries of DeepSpeed's buffer of gradients under reduction
LIVE = 1e9  # entries that ZeRO-3 keeps gathered at most (stage3_max_live_parameters)
GROUP = 1e9  # entries that ZeRO-3 updates at a time (sub_group_size)
OFFLOADED = ("masters and moments", "gradients")  # by learner.offload_while_sampling
SWAPPED = 4  # such groups of a tensor that a rank with states on NVMe has memory for (buffer_count)
_EXPERT = re.compile(r"(?P<layer>.+\.experts)\.\d+\.(?P<kind>gate|up|down)_proj\.weight")
_ENDS = ("embed_tokens", "lm_head")
Parts = dict[str, float]  # bytes by what holds them


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes that memory depends on. `of` reads them; lengths are in entries.

    Example: ModelSizes(8.2e9, 6.2e8, 151936, LayerSizes(36, 4096, 4096, 1024, 12288, True))
    """

    parameters: float
    largest: float  # of one parameter as it is trained: a layer's experts are stacked
    vocabulary: int
    layer: LayerSizes  # what activations depend on
    ends: float = 0.0  # embedding and head, which tensor parallelism leaves whole
    experts: float = 0.0  # all of them, in all layers

    def held(self, spec: LearnerSpec) -> float:
        """Entries of the model that a rank computes with, without ZeRO-3."""
        divided = (self.parameters - self.ends) / spec.tensor_parallel
        return self.ends + divided - self.experts * (1 - 1 / spec.expert_parallel)

    @classmethod
    def of(cls, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelSizes:
        """Of a config.json, and the shapes of all weights by Hugging Face name."""
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        stacked: dict[str, int] = {}
        for name, size in sizes.items():
            found = _EXPERT.fullmatch(name)
            if found is None:
                stacked[name] = size
            else:
                kind = "down" if found["kind"] == "down" else "gate_up"
                label = f"{found['layer']}.{kind}"
                stacked[label] = stacked.get(label, 0) + size
        return cls(
            parameters=float(sum(sizes.values())),
            largest=float(max(stacked.values())),
            vocabulary=int(config["vocab_size"]),
            layer=LayerSizes.of(config, qk_norm=any(n.endswith("q_norm.weight") for n in shapes)),
            ends=float(sum(size for name, size in sizes.items() if name.split(".")[-2] in _ENDS)),
            experts=float(sum(size for name, size in sizes.items() if _EXPERT.fullmatch(name))),
        )

    def key_bytes(self, tokens: int, width: int = 2) -> float:
        """Keys and values of a sequence."""
        return 2.0 * self.layer.layers * self.layer.keys * width * tokens


def learner_rank(
    sizes: ModelSizes, spec: LearnerSpec, *, kl: bool = False, trained: float | None = None
) -> Parts:
    """Peak bytes on the device of one rank, in a backward pass or at the optimizer step, whichever
    is more.

    `kl`: a frozen policy is held beside the trained one. `trained`: entries that are trained; None:
    all.
    """
    own = sizes.held(spec) if trained is None else trained
    parts = _held(sizes, spec, own)
    if kl:
        parts["frozen policy"] = frozen_model(sizes, spec)
    if not spec.num_gpus:  # its host is its device
        parts |= _offloaded(sizes, spec, own, kl=kl)
    passing, step = _passing(sizes, spec, own), _step(sizes, spec, own)
    return parts | (passing if total(passing) > total(step) else step)


def waiting_rank(
    sizes: ModelSizes, spec: LearnerSpec, *, kl: bool = False, trained: float | None = None
) -> Parts:
    """Bytes that a rank keeps on the device during the engines' turn (`schedule.colocated`)."""
    parts = _held(sizes, spec, sizes.held(spec) if trained is None else trained)
    if spec.offload_while_sampling:
        parts = {name: size for name, size in parts.items() if name not in OFFLOADED}
    if kl:
        parts["frozen policy"] = frozen_model(sizes, spec)
    return parts


def frozen_model(sizes: ModelSizes, spec: LearnerSpec) -> float:
    """Bytes of a model without gradients: whole layers, also beside parts of the policy's."""
    if spec.offload.parameters != "none":
        return 0.0
    split = spec.ranks if spec.zero_stage == 3 else 1
    return BYTES[spec.compute_dtype] * sizes.parameters / split


def _partition(sizes: ModelSizes, spec: LearnerSpec, own: float) -> float:
    """Entries of a rank's part of the state that ZeRO divides: `own` entries are divided among the
    ranks that would hold the same ones. Experts that fewer ranks hold are divided among fewer, so
    that all parts are equal."""
    if spec.expert_parallel > 1:
        return sizes.parameters / spec.ranks
    return own / (spec.ranks // spec.tensor_parallel)


def _held(sizes: ModelSizes, spec: LearnerSpec, own: float) -> Parts:
    """Return the memory that a rank always holds."""
    stage, mixed = spec.zero_stage, spec.compute_dtype != "float32"
    mine = _partition(sizes, spec, own)
    weights = BYTES[spec.compute_dtype] * sizes.held(spec)
    parts: Parts = {"weights": weights / spec.ranks if stage == 3 else weights}
    if spec.offload.parameters != "none":
        parts["weights"] = 0.0
    if spec.offload.optimizer != "none":
        return parts | {"bucket of gradients": 4.0 * min(BUCKET, own)}
    # stage 0 trains the weights themselves
    parts["masters and moments"] = 8.0 * own if stage == 0 else 12.0 * mine
    if stage == 1 and mixed:
        parts["gradients"] = 4.0 * own
    if stage == 3:
        parts["gradients"] = 4.0 * mine
        parts["bucket of gradients"] = 4.0 * min(BUCKET, own)
    return parts


def _offloaded(sizes: ModelSizes, spec: LearnerSpec, own: float, *, kl: bool) -> Parts:
    """Return the memory that a rank always holds on its host."""
    mine, parts = own / spec.ranks, Parts()
    if spec.offload.parameters != "none":
        weights = BYTES[spec.compute_dtype] * sizes.parameters / spec.ranks
        parts["parameters on the host"] = weights * (2 if kl else 1)
    if spec.offload.optimizer == "cpu":
        # gradients as they add up, and as they are applied
        parts |= {"states on the host": 12.0 * mine, "gradients on the host": 8.0 * mine}
    elif spec.offload.optimizer == "nvme":
        parts["states being updated"] = SWAPPED * 4.0 * min(mine, GROUP)
        parts["gradients on the host"] = 4.0 * mine
    return parts


def _passing(sizes: ModelSizes, spec: LearnerSpec, own: float) -> Parts:
    """Return the memory that a forward and backward pass holds in addition. The gradients of a
    model that fits into one bucket are reduced at the end of the pass, when activations are
    freed."""
    stage, width = spec.zero_stage, BYTES[spec.compute_dtype]
    mixed = width < 4
    parts = _activations(sizes, spec, width)
    bucket = min(BUCKET, own)
    if stage == 0 or stage == 1:
        held = {"gradients on their way": width * own}
        sent = {"bucket of gradients": 4.0 * bucket if stage == 1 else 0.0}
        if stage == 1 and mixed:  # at the end of the pass
            return held | (sent if total(sent) > total(parts) else parts)
        parts |= held | sent
    elif stage == 2:
        reduced = 4.0 * _partition(sizes, spec, own)
        flush = (8.0 if mixed else 4.0) * bucket
        if own > BUCKET:
            return parts | {"gradients": reduced, "bucket of gradients": flush}
        if flush + reduced > width * bucket + total(parts):
            return {"gradients": reduced, "bucket of gradients": flush}
        parts["bucket of gradients"] = width * bucket
    else:
        parts["gathered layers"] = width * min(sizes.parameters, LIVE)
        # reduced in float32, whatever they are computed in
        parts["gradients on their way"] = 4.0 * bucket if mixed else 0.0
        if spec.offload.optimizer == "nvme":  # copied before they are written
            parts["gradients to be written"] = 4.0 * bucket
    return parts


def _activations(sizes: ModelSizes, spec: LearnerSpec, width: int) -> Parts:
    tokens = -(-most_positions(spec, lambda: sizes.layer) // spec.sequence_parallel)
    layer = sizes.layer.position_bytes(width, spec.tensor_parallel) * tokens
    kept = layer * sizes.layer.layers
    if spec.gradient_checkpointing:
        kept = layer + sizes.layer.layers * sizes.layer.hidden * width * tokens
    chunk = min(spec.head_chunk_tokens, max(64, tokens // 8))
    logits = chunk * sizes.vocabulary * (8.0 + (width if width < 4 else 0))
    return {"activations": kept, "logits": logits}


def _step(sizes: ModelSizes, spec: LearnerSpec, own: float) -> Parts:
    """Return the memory that an optimizer step holds in addition to what is always held."""
    stage, mixed = spec.zero_stage, spec.compute_dtype != "float32"
    if stage == 0:
        return {"gradients": 4.0 * own, "optimizer": 8.0 * sizes.largest}
    mine = _partition(sizes, spec, own)
    if stage == 3:
        mine = min(mine, GROUP)  # updated in groups
    if spec.offload.optimizer != "none":  # on the host, whose fused kernel has no temporaries
        return {"optimizer": 0.0 if spec.num_gpus else 8.0 * mine}
    # torch's AdamW makes two temporaries, its fused kernel on GPUs none
    parts: Parts = {"optimizer": 0.0 if spec.num_gpus else 8.0 * mine}
    parts["gradients being applied"] = 4.0 * mine
    if not mixed and stage < 3:
        parts["gradients reduced"] = 4.0 * (own if stage == 1 else mine)
    if mixed and stage == 1:  # applied where they are
        parts["gradients being applied"] = 2.0 * mine
    return parts


def learner_host(
    sizes: ModelSizes,
    spec: LearnerSpec,
    *,
    bucket_bytes: float,
    kl: bool = False,
    trained: float | None = None,
    kept_width: int = 0,
) -> Parts:
    """Peak bytes in the host memory of one rank: what its GPU offloads, for good or in the engines'
    turn, a checkpoint on its way to the disk, and, on rank 0, a publication by the object store.

    `kept_width`: bytes an entry of the set that rank 0 keeps to find changed entries
    (`cluster.full_weights_every`); 0: none."""
    own = sizes.parameters if trained is None else trained
    largest = sizes.largest * BYTES[spec.compute_dtype]
    offloaded = _offloaded(sizes, spec, own, kl=kl) if spec.num_gpus else {}
    kept = {"weights as published": kept_width * sizes.parameters} if kept_width else {}
    if spec.num_gpus and spec.offload_while_sampling:  # kept between the engines' turns, too
        held = _held(sizes, spec, own)
        kept["states in the engines' turn"] = sum(held.get(name, 0.0) for name in OFFLOADED)
    return (
        offloaded
        | kept
        | {
            "checkpoint": 12.0 * own / spec.ranks,
            "publication": 2 * max(bucket_bytes, largest) + largest,
        }
    )


def actor_rank(sizes: ModelSizes, actor: ActorSpec, *, bucket_bytes: float, max_len: int) -> Parts:
    """Least bytes on the GPU of one rank of an engine: its weights, a sequence of the longest kind,
    and the buckets of weights that arrive."""
    width = 1.0 if actor.kind == "fp8" and actor.rounding == "none" else 2.0
    if actor.compute_dtype == "float32":
        width = 4.0
    keys = sizes.key_bytes(max_len, 1 if actor.fp8_kv_cache else 2)
    return {
        "weights": width * sizes.parameters / actor.tensor_parallel,
        "keys of one sequence": keys / actor.tensor_parallel,
        "arriving weights": 2 * max(bucket_bytes, sizes.largest * 2),
    }


def total(parts: Parts) -> float:
    """Bytes of all parts."""
    return sum(parts.values())


def in_words(parts: Parts) -> str:
    """Example: "41.2 GiB: weights 4.0, gradients 8.0, ..." """
    shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
    return f"{total(parts) / GIB:.1f} GiB: {shown}"
