"""Veto: one token that the learner finds all but impossible drops its whole sequence."""

from __future__ import annotations

from rlcore.corrections.base import BaseCorrection
from rlcore.corrections.formulas.numerics import total
from rlcore.corrections.functional import veto
from rlcore.interfaces import Corrected, Reduce
from rlcore.types import StepTensors


class Veto(BaseCorrection):
    """A sequence with a token of `p_ref/p_inf < threshold` leaves the loss and its denominators (DVP app. A).

    Goes with any other correction, and with none. Its advantage has by then been compared with its group's.
    """

    name = "veto"

    def __init__(self, *, threshold: float = 1e-4) -> None:
        self.threshold = threshold

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        keep = veto(step.logp_ref, step.logp_inf, step.mask, threshold=self.threshold)
        vetoed, sequences = total([~keep, step.mask.any(-1)], reduce)
        metrics = {"vetoed_share": vetoed / max(sequences, 1.0)}
        return Corrected(current.weight, current.mask & keep[:, None], metrics)
