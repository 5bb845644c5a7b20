"""Settings of how weights travel, and of their rounding. No torch."""

from __future__ import annotations

from typing import Literal

from rlcore.spec import Spec, setting

# Classes that inherit `interfaces.WeightTransport`; a user's own is named by its path.
TRANSPORTS: dict[str, str] = {
    "object_store": "rlcore.weights.buckets:ObjectStoreTransport",
    "disk": "rlcore.weights.buckets:DiskTransport",
}
# Learner and actors join one group: classes that inherit `cluster.transports.GroupTransport`.
GROUP_TRANSPORTS: dict[str, str] = {
    "nccl": "rlcore.cluster.transports:VllmGroup",
    "ipc": "rlcore.cluster.transports:VllmGroup",
    "gloo": "rlcore.cluster.transports:GlooGroup",
}
Rounding = Literal["none", "fp8", "int8", "int4", "int3", "mxfp4", "nvfp4"]
#: four-bit floats, and how many columns of a row share a scale
BLOCK_FORMATS = {"mxfp4": 32, "nvfp4": 16}
Scales = Literal["tensor", "channel", "block"]
ActivationRounding = Literal["none", "fp8", "int8", "mxfp4", "nvfp4"]


class TransportSpec(Spec):
    """How published weights reach the actors."""

    transport: str = setting(
        "object_store",
        "how weights travel to actors: object_store; disk; nccl: from GPU to GPU; ipc: on GPUs "
        "that both share; gloo: CPU; or file.py:Class",
        names="code",
    )
    bucket_mib: int = setting(
        512,
        "weights travel in buckets of this size, loaded while the next is sent",
        unit="MiB",
        gt=0,
    )
    full_weights_every: int = setting(
        1,
        "publications from one whole set of weights to the next; those between send only what "
        "changed in its bits (object_store, nccl); 1: all are whole",
        gt=0,
    )
    verify_weights: Literal["sampled", "full"] = setting(
        "sampled", "tensors whose checksums are compared after each publish"
    )

    @property
    def joined(self) -> bool:
        """True if weights are sent to all actors at once, out of the learner's own memory."""
        return self.transport in GROUP_TRANSPORTS


class RoundingSpec(Spec):
    """Precision of an actor's weights."""

    rounding: Rounding = setting(
        "none",
        "emulated weight rounding (CPU); mxfp4, nvfp4: E2M1 with scales of 32 and 16 entries",
    )
    scales: Scales = setting(
        "tensor", "one scale of quantised weights a tensor, output channel or 128 x 128 block"
    )
    keep_high_precision: tuple[str, ...] = setting(
        ("lm_head", "embed_tokens"), "name patterns of layers that are not quantised"
    )
    precise_layers: int = setting(
        0, "emulated rounding: decoder layers that are not rounded either, the last ones", ge=0
    )

    @property
    def alone(self) -> RoundingSpec:
        """Without what a specification that inherits this one adds."""
        return RoundingSpec(**{name: getattr(self, name) for name in RoundingSpec.model_fields})
