"""The number of positions of a micro-batch, by the memory that a layer keeps for each. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlcore.learner.specs import LearnerSpec

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


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The sizes of a model that its activations depend on; widths are in entries.

    Example: LayerSizes(36, 4096, 4096, 1024, 12288, True)
    """

    layers: int
    hidden: int
    queries: int  # of a position in a layer
    keys: int
    inner: int  # width of the MLP that a position goes through
    qk_norm: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], *, qk_norm: bool) -> LayerSizes:
        """The sizes that a config.json states. `qk_norm`: queries and keys are normalised."""
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        chosen = config.get("num_experts_per_tok") or 0
        expert = config.get("moe_intermediate_size") or 0
        return cls(
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            queries=heads * head_dim,
            keys=int(config.get("num_key_value_heads") or heads) * head_dim,
            inner=int(chosen * expert or config.get("intermediate_size") or 0),
            qk_norm=qk_norm,
        )

    def position_bytes(self, width: int, parts: int = 1) -> float:
        """Bytes kept for the backward pass of one position in one layer, in a dtype of `width`
        bytes: the two norms (in float32), attention with a variable-length kernel, and the gated
        MLP; a rank has one of `parts` of attention and MLP."""
        norm = 4 + 2 * width
        attended = self.queries + self.keys
        divided = 2 * width * attended + 4 * width * self.inner
        divided += norm * attended if self.qk_norm else 0
        return 2 * norm * self.hidden + divided / parts


def most_positions(spec: LearnerSpec, sizes_of: Callable[[], LayerSizes]) -> int:
    """`learner.micro_batch_tokens`, with auto resolved by sizes alone, so that runs of one
    configuration divide their batches alike. `sizes_of` is asked where they are needed."""
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
