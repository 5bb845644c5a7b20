"""Veto: one token that the learner finds all but impossible drops its whole sequence."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, ClassVar

from rlcore.corrections.numerics import (
    log_difference,
    require,
    same_shape,
    total,
)
from rlcore.corrections.specs import CorrectionSpec, Statistics
from rlcore.interfaces import Corrected, Correction, Reduce
from rlcore.objectives.protocols import Bias
from rlcore.spec import setting
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor


class VetoSpec(CorrectionSpec):
    """Drops a sequence that holds a token to which the learner assigns almost no probability.

    Biased by the dropped sequences, which leave the denominators too."""

    method: ClassVar[str] = "rlcore.corrections.veto:Veto"
    statistics: ClassVar[Statistics] = {
        "vetoed_share": ("share", "sequences dropped"),
    }

    threshold: float = setting(
        1e-4, "a token with p_ref/p_inf below drops its sequence", gt=0, lt=1
    )

    @property
    def biases(self) -> tuple[Bias, ...]:
        return (Bias("dropped sequences", {"threshold": 1e-300}),)


_VETO = VetoSpec()


def veto(
    logp_target: Tensor, logp_inf: Tensor, mask: Tensor, *, threshold: float = _VETO.threshold
) -> Tensor:
    """Keep the sequences with no token of `p_target/p_inf < threshold` (DVP app. A). Returns keep
    [B] bool.

    Only unmasked tokens with comparable log-probs can veto; an empty sequence stays.
    """
    require(0.0 < threshold <= 1.0, f"threshold={threshold} is not accepted: it is in (0, 1].")
    same_shape(logp_target=logp_target, logp_inf=logp_inf, mask=mask)
    # compared in logs, unclamped: a ratio clamped at e^-20 would never be below a smaller threshold
    difference, usable = log_difference(logp_target, logp_inf, mask)
    return ~((difference < log(threshold)) & usable).any(-1)


class Veto(Correction):
    """A sequence with a token of `p_ref/p_inf < threshold` leaves the loss and its denominators
    (DVP app. A).

    Works alone or with any other correction. Advantages were computed before, with the dropped
    sequences in their groups."""

    def __init__(self, spec: VetoSpec, run_seed: int) -> None:
        self.spec = spec

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        # over all sampled tokens, whatever an earlier correction has rejected
        keep = veto(step.logp_ref, step.logp_inf, step.mask, threshold=self.spec.threshold)
        vetoed, sequences = total([~keep, step.mask.any(-1)], reduce)
        metrics = {"vetoed_share": vetoed / max(sequences, 1.0)}
        return Corrected(current.weight, current.mask & keep[:, None], metrics)
