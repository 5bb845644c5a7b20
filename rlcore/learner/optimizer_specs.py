"""Settings of the optimizer. No torch."""

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
