"""Masked importance sampling."""

from __future__ import annotations

from rlcore.corrections.base import BaseCorrection
from rlcore.corrections.formulas.numerics import share
from rlcore.corrections.formulas.ratios import Level
from rlcore.corrections.functional import mis
from rlcore.errors import UserError
from rlcore.interfaces import Corrected, Reduce
from rlcore.types import StepTensors


class Mis(BaseCorrection):
    """Weight `p_ref/p_inf` where it lies in `[low, high]`, else 0; per token, sequence or geometric mean (DVP sec. 6).

    A zero weight stays in the loss's denominator: the term is set to 0, the mean is still over all tokens.
    """

    name = "mis"
    weighs = True

    def __init__(self, *, low: float = 0.5, high: float = 2.0, level: Level = "token") -> None:
        if not low <= 1.0 <= high:
            raise UserError(
                f"correction.{self.name}.low={low}, correction.{self.name}.high={high} is not accepted: matched tokens "
                "have ratio 1 and must keep their weight, so low <= 1 <= high."
            )
        self.low, self.high, self.level = low, high, level

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        weight = mis(step.logp_ref, step.logp_inf, step.mask, low=self.low, high=self.high, level=self.level)
        metrics = {"masked_share": share(weight == 0, current.mask, reduce)}
        return Corrected(current.weight * weight, current.mask, metrics)
