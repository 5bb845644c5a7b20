"""Settings of the optimizer, and of what is kept off the GPUs. No torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from rlcore.spec import Spec, Unread, refuse, setting

LrSchedule = Literal["constant", "linear", "cosine"]


class OptimizerSpec(Spec):
    """AdamW, its learning rate and the clip of the gradient."""

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(
            ("lr_decay_steps", "lr_final"),
            lambda spec: spec.lr_schedule == "constant",
            "lr_schedule=constant has no decay",
        ),
    )

    lr: float = setting(2e-4, "peak learning rate", gt=0)
    lr_warmup_steps: int = setting(5, "steps of linear warm-up", ge=0)
    lr_schedule: LrSchedule = setting("constant", "after the warm-up, until lr_decay_steps")
    lr_decay_steps: int | None = setting(
        None,
        "null: schedule.steps; a number keeps the rate when a run is made longer later",
        gt=0,
    )
    lr_final: float = setting(0.0, "share of lr that linear and cosine end at", ge=0, le=1)
    betas: tuple[float, float] = setting((0.9, 0.95), "of AdamW")
    eps: float = setting(1e-8, "of AdamW, added to the root of the second moment", gt=0)
    weight_decay: float = setting(0.0, "of AdamW", ge=0)
    grad_clip: float = setting(1.0, "largest gradient norm", gt=0)

    def check_decay(self, key: str, steps: int) -> None:
        """Raise UserError for a warm-up that leaves no step to the decay. `steps`: of the run."""
        named = self.lr_decay_steps is not None
        end = self.lr_decay_steps or steps
        refuse(
            self.lr_schedule != "constant" and self.lr_warmup_steps >= end,
            f"{key}.lr_warmup_steps={self.lr_warmup_steps} leaves no step to {key}.lr_schedule="
            f"{self.lr_schedule}, which ends after {f'{key}.lr_decay_steps' if named else 'all'}"
            f"{'=' if named else ' '}{end}{'' if named else ' steps of the run'}: set {key}."
            f"lr_warmup_steps={end - 1} or less, or {key}.lr_schedule=constant.",
        )


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
    nvme_path: str | None = setting(None, "folder of optimizer=nvme, on a local disk of each node")
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
