"""The number of positions of a micro-batch, by the memory that a layer keeps for each. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlcore.learner.specs import LearnerSpec
from rlcore.models.sizes import LayerSizes

# of a configuration, as transformers calls them
NAMES = (
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "hidden_size",
    "head_dim",
    "intermediate_size",
    "num_experts_per_tok",
    "moe_intermediate_size",
)


@dataclass(frozen=True, slots=True)
class ActivationBudget:
    """The size that micro_batch_tokens=auto takes on a kind of device: fixed, nothing is
    measured."""

    bytes: int  # of activations
    least: int  # positions: with fewer, fixed work is repeated
    most: int  # with more, nothing was gained (benchmarks/results/profile_cpu.md)


# unproven on GPUs: the size of configs/learner/gpu.yaml, where 4 GiB hold it
ROOM = {
    "cpu": ActivationBudget(512 << 20, 1024, 4096),
    "cuda": ActivationBudget(4 << 30, 1024, 16384),
}


def most_positions(spec: LearnerSpec, sizes_of: Callable[[], LayerSizes]) -> int:
    """`learner.micro_batch_tokens`, with auto resolved by sizes alone, so that runs of one
    configuration divide their batches equally. `sizes_of` is asked where they are needed."""
    if spec.micro_batch_tokens != "auto":
        return spec.micro_batch_tokens
    sizes = sizes_of()
    width = 4 if spec.compute_dtype == "float32" else 2
    each = sizes.position_bytes(width)
    if spec.gradient_checkpointing:
        each = sizes.hidden * width
    room = ROOM[spec.device]
    fitting = int(room.bytes / (each * sizes.layers))
    return min(room.most, max(room.least, fitting))
