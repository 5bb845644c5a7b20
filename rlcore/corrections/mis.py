"""Masked importance sampling."""

from __future__ import annotations

from rlcore.corrections.formulas.numerics import share
from rlcore.corrections.formulas.ratios import mis
from rlcore.corrections.scope import inside
from rlcore.corrections.specs import MisSpec
from rlcore.interfaces import Corrected, Correction, Reduce
from rlcore.types import StepTensors


class Mis(Correction):
    """Weight `p_ref/p_inf` where it lies in `[low, high]`, else 0; per token, sequence or geometric
    mean (DVP sec. 6).

    A zero weight stays in the loss's denominator: the term is set to 0, the mean is still over all
    tokens.
    """

    def __init__(self, spec: MisSpec, run_seed: int) -> None:
        self.spec = spec

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        spec = self.spec
        # step.mask, not current.mask: a sequence's product is over all of its sampled tokens
        weight = mis(
            step.logp_ref,
            step.logp_inf,
            step.mask,
            low=spec.low,
            high=spec.high,
            level=spec.level,
        )
        metrics = {"masked_share": share(weight == 0, inside(step, current.mask), reduce)}
        return Corrected(current.weight * weight, current.mask, metrics)
