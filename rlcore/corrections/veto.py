"""Veto: one token that the learner finds all but impossible drops its whole sequence."""

from __future__ import annotations

from rlcore.corrections.formulas.numerics import total
from rlcore.corrections.formulas.ratios import veto
from rlcore.corrections.specs import VetoSpec
from rlcore.interfaces import Corrected, Correction, Reduce
from rlcore.types import StepTensors


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
