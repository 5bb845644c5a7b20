"""Truncated importance sampling."""

from __future__ import annotations

from rlcore.corrections.base import BaseCorrection, at_least_one
from rlcore.corrections.formulas.numerics import share
from rlcore.corrections.formulas.ratios import TokenOrSequence, importance_ratio
from rlcore.corrections.functional import tis
from rlcore.interfaces import Corrected, Needs, Reduce
from rlcore.types import StepTensors


class Tis(BaseCorrection):
    """Weight `min(p_ref/p_inf, cap)` per token or per sequence (Jackpot eq. 6).

    `adjusted` weighs by `min(SG(p_new)/p_inf, cap)` instead and switches PPO's clip off (Jackpot B.1, TIS-adjusted).
    """

    name = "tis"
    weighs = True

    def __init__(self, *, cap: float = 2.0, level: TokenOrSequence = "token", adjusted: bool = False) -> None:
        at_least_one("correction.tis.cap", cap)
        self.cap, self.level, self.adjusted = cap, level, adjusted
        self.needs = Needs(new=adjusted, short_circuit=adjusted)

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        target = step.logp_new if self.adjusted else step.logp_ref
        weight = tis(target, step.logp_inf, step.mask, cap=self.cap, level=self.level)
        ratio, _ = importance_ratio(target, step.logp_inf, step.mask, self.level)
        metrics = {"truncated_share": share(ratio > self.cap, current.mask, reduce)}
        return Corrected(current.weight * weight, current.mask, metrics)
