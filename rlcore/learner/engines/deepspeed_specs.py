"""Settings of DeepSpeed as a training engine, in the section `learner`. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from rlcore.spec import Spec, Unread, refuse, setting


class OffloadSpec(Spec):
    """The tensors that ZeRO-3 keeps off the GPUs, by DeepSpeed's own offload."""

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(
            ("pin_memory",),
            lambda spec: spec.optimizer == spec.parameters == "none",
            "optimizer=none with parameters=none offloads nothing",
        ),
    )

    optimizer: Literal["none", "cpu", "nvme"] = setting(
        "none",
        "cpu: AdamW's float32 weights and moments are in host memory, and the step is computed "
        "there; nvme: on disk between steps",
    )
    parameters: Literal["none", "cpu"] = setting(
        "none", "cpu: a rank's parameters, and the KL reference's, are in host memory between uses"
    )
    nvme_path: str | None = setting(
        None, "folder of optimizer=nvme, on a local disk of each node", names="path"
    )
    pin_memory: bool = setting(True, "page-locked host memory: faster copies, less to swap out")

    def check(self, key: str) -> None:
        refuse(
            self.parameters != "none" and self.optimizer == "none",
            f"{key}.parameters={self.parameters} would leave the larger part on the GPU: set "
            f"{key}.optimizer=cpu or nvme as well.",
        )
        refuse(
            self.optimizer == "nvme" and not self.nvme_path,
            f"{key}.optimizer=nvme needs a folder on a local disk of each node: set "
            f"{key}.nvme_path.",
        )
        refuse(
            self.optimizer != "nvme" and self.nvme_path is not None,
            f"{key}.nvme_path={self.nvme_path} is read by {key}.optimizer=nvme alone, which is "
            f"{self.optimizer}: leave it null, or set optimizer=nvme.",
        )


class DeepSpeedSpec(Spec):
    """The division of a model among ranks, and the tensors that are kept off the GPUs."""

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(
            ("overlap_comm",),
            lambda spec: spec.zero_stage != 3,
            "zero_stage is not 3, which alone has such a stream",
        ),
    )
    #: settings that an engine reads if its facts say so; true: refused with another engine, which
    #: would compute something else; false: named as not read
    engine_settings: ClassVar[Mapping[str, bool]] = {
        "sequence_parallel": True,
        "tensor_parallel": True,
        "expert_parallel": True,
        "zero_stage": False,
        "overlap_comm": False,
        "offload": False,
        "offload_while_sampling": False,
    }

    sequence_parallel: int = setting(
        1,
        "ranks that hold parts of the same sequences, for contexts too long for one (Ulysses): a "
        "divisor of ranks and of the attention heads",
        gt=0,
    )
    tensor_parallel: int = setting(
        1,
        "ranks that hold parts of the same layers' matrices, at ZeRO 0 to 2 (AutoTP): a divisor of "
        "ranks, of the key heads and of the MLP's width",
        gt=0,
    )
    expert_parallel: int = setting(
        1,
        "ranks that hold parts of the experts of every layer, at ZeRO 0 to 2 (AutoEP): a divisor "
        "of ranks and of the experts",
        gt=0,
    )
    zero_stage: Literal[0, 1, 2, 3] = setting(
        0, "what DeepSpeed shards: 1 optimizer, 2 and gradients, 3 and parameters"
    )
    overlap_comm: bool | None = setting(
        None,
        "ZeRO-3: gradients are reduced on a second stream, during the backward pass; null: on GPUs",
    )
    offload: OffloadSpec = OffloadSpec()
    offload_while_sampling: bool = setting(
        False,
        "schedule.colocated: masters, moments and buffers of gradients are on the host while "
        "engines are awake",
    )
