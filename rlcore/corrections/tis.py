"""Truncated importance sampling."""

from __future__ import annotations

from rlcore.corrections.formulas.numerics import share
from rlcore.corrections.formulas.ratios import importance_ratio, tis
from rlcore.corrections.scope import inside
from rlcore.corrections.specs import TisSpec
from rlcore.interfaces import Corrected, Correction, Reduce
from rlcore.types import StepTensors


class Tis(Correction):
    """Weight `min(p_ref/p_inf, cap)` per token or per sequence (Jackpot eq. 6).

    `adjusted` switches PPO's clip off, so that the pipeline has weights lead to p_new: `min(SG(
    p_new)/p_inf, cap)` (Jackpot B.1, TIS-adjusted).
    """

    def __init__(self, spec: TisSpec, run_seed: int) -> None:
        self.spec = spec

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        spec = self.spec
        # step.mask, not current.mask: a sequence's product is over all of its sampled tokens
        weight = tis(step.logp_ref, step.logp_inf, step.mask, cap=spec.cap, level=spec.level)
        ratio, _ = importance_ratio(step.logp_ref, step.logp_inf, step.mask, spec.level)
        compared = inside(step, current.mask)
        metrics = {"truncated_share": share(ratio > spec.cap, compared, reduce)}
        return Corrected(current.weight * weight, current.mask, metrics)
