"""The four hooks of a correction, each the identity. A correction overrides those it is about."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rlcore.errors import UserError
from rlcore.interfaces import Corrected, Needs, Reduce
from rlcore.types import SamplingSpec, StepTensors

if TYPE_CHECKING:
    import torch


class BaseCorrection:
    """Implements `rlcore.interfaces.Correction` as the identity.

    `weighs` says that the correction multiplies the objective by an importance ratio towards the learner's policy: two
    of those at once would correct the same mismatch twice, so the pipeline refuses them.
    """

    name: ClassVar[str]
    weighs: bool = False
    needs: Needs = Needs()

    def constrain_sampling(self, sampling: SamplingSpec) -> SamplingSpec:
        """Hook 1: the distribution the actor samples from. Raises UserError where the constraint cannot be added."""
        return sampling

    def advantages(self, step: StepTensors, reduce: Reduce) -> torch.Tensor | None:
        """Hook 3: advantages [B,T] in place of the algorithm's; None keeps those."""
        return None

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        """Hook 4: weights multiplied, masks intersected, metrics of this correction added under plain names."""
        return current

    def check(self, sampling: SamplingSpec) -> None:
        """Raise UserError when this correction cannot work with what the actors sample from and store."""


def at_least_one(key: str, cap: float) -> None:
    """A cap on a ratio must leave ratio 1 alone, or matched distributions would be corrected. Raises UserError."""
    if cap < 1.0:
        raise UserError(f"{key}={cap} is not accepted: it caps a ratio that is 1 without mismatch, so it must be >= 1.")
