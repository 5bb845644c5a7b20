"""Facts of DeepSpeed as a training engine: the settings that it reads, and its memory.

The memory follows what DeepSpeed 0.19 allocates (`learner/engines/deepspeed.py`), and is compared
with what real ranks of small models hold in benchmarks/memory/memory_table.py. Allocators and
libraries add to it; nothing here has been measured on a GPU. No torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rlcore.engine_facts import Division, EngineFacts, RankLoad, RankMemory
from rlcore.learner.engines.deepspeed_specs import DeepSpeedSpec
from rlcore.learner.limits import most_positions
from rlcore.learner.specs import LearnerSpec
from rlcore.models.sizes import BYTES, ModelSizes, Parts, total
from rlcore.spec import refuse

if TYPE_CHECKING:
    from rlcore.config.schema import RunConfig

BUCKET = 5e8  # entries of DeepSpeed's buffer of gradients under reduction
LIVE = 1e9  # entries that ZeRO-3 keeps gathered at most (stage3_max_live_parameters)
GROUP = 1e9  # entries that ZeRO-3 updates at a time (sub_group_size)
OFFLOADED = ("masters and moments", "gradients")  # by learner.offload_while_sampling
SWAPPED = 4  # such groups of a tensor that a rank with states on NVMe has memory for (buffer_count)


class DeepSpeedFacts(EngineFacts):
    """ZeRO 0 to 3, with parts of sequences, layers and experts, and offloading."""

    reads: ClassVar[frozenset[str]] = frozenset(DeepSpeedSpec.engine_settings)
    smaller: ClassVar[str] = (
        "set learner.zero_stage=3 or learner.offload.optimizer=cpu, or raise "
        "learner.sequence_parallel"
    )

    @classmethod
    def refuse(cls, spec: LearnerSpec, key: str) -> None:
        refuse(
            spec.zero_stage == 0 and spec.compute_dtype == "bfloat16",
            f"{key}.zero_stage=0 would accumulate gradients in bfloat16, which {key}.dtype="
            f"{spec.dtype} with {key}.num_gpus={spec.num_gpus:g} means: choose 1, 2 or 3, or "
            f"{key}.dtype=float32.",
        )
        refuse(
            spec.offload.optimizer != "none" and spec.zero_stage != 3,
            f"{key}.offload.optimizer={spec.offload.optimizer} needs {key}.zero_stage=3, which is "
            f"{spec.zero_stage}: below it DeepSpeed adds up offloaded gradients in bfloat16.",
        )
        for division in cls.divisions(spec):
            _check_divides(spec, key, division)

    @classmethod
    def refuse_run(cls, c: RunConfig, spec: LearnerSpec, key: str) -> None:
        refuse(
            spec.offload_while_sampling and not c.schedule.colocated,
            f"{key}.offload_while_sampling=true frees memory for engines on the learner's GPUs, "
            "which schedule.colocated=false gives it alone: leave it false.",
        )

    @classmethod
    def words(cls, spec: LearnerSpec) -> str:
        return f"ZeRO-{spec.zero_stage}"

    @classmethod
    def divisions(cls, spec: LearnerSpec) -> tuple[Division, ...]:
        return (
            Division("sequences", "sequence_parallel", spec.sequence_parallel),
            Division("layers", "tensor_parallel", spec.tensor_parallel),
            Division("experts", "expert_parallel", spec.expert_parallel),
        )

    @classmethod
    def rank_memory(cls, sizes: ModelSizes, spec: LearnerSpec, load: RankLoad) -> RankMemory:
        return RankMemory(
            learner_rank(sizes, spec, kl=load.kl, trained=load.trained),
            waiting_rank(sizes, spec, kl=load.kl, trained=load.trained),
            learner_host(
                sizes,
                spec,
                bucket_bytes=load.bucket_bytes,
                kl=load.kl,
                trained=load.trained,
                kept_width=load.kept_width,
            ),
        )

    @classmethod
    def unused_room(cls, spec: LearnerSpec) -> str:
        return "" if spec.offload_while_sampling else "learner.offload_while_sampling=true"

    @classmethod
    def frozen_bytes(cls, sizes: ModelSizes, spec: LearnerSpec) -> float:
        return frozen_model(sizes, spec)


def overlaps(spec: LearnerSpec) -> bool:
    """`overlap_comm` with null resolved, at the stage that has it."""
    wanted = spec.num_gpus > 0 if spec.overlap_comm is None else spec.overlap_comm
    return wanted and spec.zero_stage == 3


def _check_divides(spec: LearnerSpec, key: str, division: Division) -> None:
    count = division.ranks
    divisors = [n for n in range(1, spec.ranks + 1) if spec.ranks % n == 0]
    refuse(
        count not in divisors,
        f"{key}.{division.name}={count} does not divide {key}.ranks={spec.ranks}: choose one of "
        f"{', '.join(map(str, divisors))}.",
    )


def _computed(sizes: ModelSizes, spec: LearnerSpec) -> float:
    """Entries of the model that a rank computes with, without ZeRO-3."""
    divided = (sizes.parameters - sizes.ends) / spec.tensor_parallel
    return sizes.ends + divided - sizes.experts * (1 - 1 / spec.expert_parallel)


def learner_rank(
    sizes: ModelSizes, spec: LearnerSpec, *, kl: bool = False, trained: float | None = None
) -> Parts:
    """Peak bytes on the device of one rank, in a backward pass or at the optimizer step, whichever
    is more.

    `kl`: a frozen policy is held next to the trained one. `trained`: entries that are trained;
    None: all.
    """
    own = _computed(sizes, spec) if trained is None else trained
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
    parts = _held(sizes, spec, _computed(sizes, spec) if trained is None else trained)
    if spec.offload_while_sampling:
        parts = {name: size for name, size in parts.items() if name not in OFFLOADED}
    if kl:
        parts["frozen policy"] = frozen_model(sizes, spec)
    return parts


def frozen_model(sizes: ModelSizes, spec: LearnerSpec) -> float:
    """Bytes of a model without gradients: whole layers, also next to parts of the policy's."""
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
    weights = BYTES[spec.compute_dtype] * _computed(sizes, spec)
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
    """Peak bytes in the host memory of one rank. They hold what its GPU offloads, for good or in
    the engines' turn, and a checkpoint on its way to the disk. Rank 0 also has a publication by the
    object store.

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
