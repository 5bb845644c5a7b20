"""What a learner that keeps states off its GPUs is accepted with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcore.spec import refuse

if TYPE_CHECKING:
    from rlcore.learner.specs import LearnerSpec


def check_offload(spec: LearnerSpec, key: str) -> None:
    """Raise UserError for a combination that does not work or is not proven."""
    place = spec.offload.optimizer
    if place == "none":
        return
    offloaded = f"{key}.offload.optimizer={place}"
    refuse(
        spec.zero_stage != 3,
        f"{offloaded} needs {key}.zero_stage=3, which is {spec.zero_stage}: below it DeepSpeed "
        "adds up offloaded gradients in bfloat16.",
    )
    refuse(
        spec.offload_while_sampling,
        f"{key}.offload_while_sampling=true would move what {offloaded} keeps off the GPU at all "
        "times: choose one.",
    )
    for name in ("distill", "draft"):
        refuse(
            getattr(spec, name) is not None,
            f"{offloaded} is not proven with {key}.{name}: use none, or train the policy alone.",
        )
