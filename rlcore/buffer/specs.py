"""Settings of admission, sampling and selection. No torch."""

from __future__ import annotations

from typing import Literal

from rlcore.spec import Spec, refuse, setting


class BatchingSpec(Spec):
    """Which groups a step trains on, and how old they may be (`buffer/admission.py`)."""

    groups_per_step: int = setting(64, "prompts trained on in one optimizer step", gt=0)
    steps_per_publish: int = setting(1, "H: optimizer steps between publishes", gt=0)
    max_staleness: int = setting(
        0, "eta: staleness allowed beyond the H-1 of a phase", unit="optimizer steps", ge=0
    )
    sampling: Literal["fifo", "uniform", "by_task"] = setting(
        "fifo", "order in which groups are trained on"
    )
    max_uses: int = setting(1, "uniform: times a group may be trained on", gt=0)

    @property
    def synchronous(self) -> bool:
        """Whether generation and learning take turns (eta = 0)."""
        return self.max_staleness == 0

    def check(self, key: str) -> None:
        refuse(
            self.max_uses > 1 and self.sampling != "uniform",
            f"{key}.max_uses={self.max_uses} needs {key}.sampling=uniform: {self.sampling} takes "
            "every group once.",
        )


class SelectionSpec(Spec):
    """Which samples of a finished group are trained on."""

    dynamic_sampling: bool = setting(
        False, "groups with all-equal rewards are filtered and replaced"
    )
    keep_best: int | None = setting(
        None, "oversampling: train on the n best samples of each group", gt=0
    )

    def check(self, key: str) -> None:
        refuse(
            self.dynamic_sampling and self.keep_best == 1,
            f"{key}.keep_best=1 with {key}.dynamic_sampling=true would filter every group, since "
            "the rewards of one sample are all equal: keep 2 or more.",
        )
