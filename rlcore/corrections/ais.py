"""Adaptive importance sampling."""

from __future__ import annotations

from rlcore.corrections.formulas.adaptive import ais
from rlcore.corrections.scope import inside
from rlcore.corrections.specs import AisSpec
from rlcore.interfaces import Corrected, Correction, Needs, Reduce
from rlcore.types import StepTensors


class Ais(Correction):
    """Weight `1 + alpha (min(p_ref/p_inf, cap) - 1)`, alpha estimated from the step (AIS eq. 12 to
    18).

    The paper's mini-batch is here the step's global batch: the tokens still in the loss when AIS's
    turn comes, less those outside the safe set (DVP), which have weight 0 from there.
    """

    needs = Needs(batch_stats=True)

    def __init__(self, spec: AisSpec, run_seed: int) -> None:
        self.settings = spec.model_dump()  # the formula's keywords are the setting's names

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        weight, metrics = ais(
            step.logp_ref,
            step.logp_inf,
            step.advantages,
            inside(step, current.mask),  # a token outside would count as the largest difference
            **self.settings,
            reduce=reduce,
        )
        return Corrected(current.weight * weight, current.mask, metrics)
