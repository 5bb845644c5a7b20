"""Dynamic vocabulary pruning: actor and learner both keep to the tokens that are not vanishingly unlikely."""

from __future__ import annotations

from dataclasses import replace
from math import exp

from rlcore.corrections.base import BaseCorrection
from rlcore.corrections.formulas.numerics import total
from rlcore.errors import UserError
from rlcore.interfaces import Corrected, Needs, Reduce
from rlcore.types import SamplingSpec, StepTensors


class Dvp(BaseCorrection):
    """The actor samples with min-p = rho, the learner's log-probs are over its own safe set (DVP section 5).

    A sampled token outside the learner's safe set has ratio 0: weight 0, still in the denominator, and it takes its
    whole sequence along wherever a sequence's product or a veto is in force. The ratio of the two constrained policies
    itself is left to another correction (none, TIS, MIS, ...).
    """

    name = "dvp"

    def __init__(self, *, rho: float = exp(-13.0)) -> None:
        if not 0.0 < rho < 1.0:
            raise UserError(
                f"correction.dvp.rho={rho} is not accepted: it is a share of the largest probability, in (0, 1)."
            )
        self.rho = rho
        self.needs = Needs(safe_set_rho=rho)

    def constrain_sampling(self, sampling: SamplingSpec) -> SamplingSpec:
        constrained = replace(sampling, min_p=sampling.min_p or self.rho)
        self.check(constrained)
        return constrained

    def check(self, sampling: SamplingSpec) -> None:
        if sampling.min_p != self.rho:
            raise UserError(
                f"rollout.min_p={sampling.min_p} contradicts correction.dvp.rho={self.rho}: DVP sets the actor's min-p "
                "to rho, so that the learner can apply the same rule; leave rollout.min_p=0."
            )

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        if step.inside is None or step.coverage is None:
            raise ValueError("correction=dvp needs StepTensors.inside and .coverage: the learner applied no safe set")
        on = current.mask
        coverage = step.coverage.float().clamp(0, 1)
        outside, covered, count = total([~step.inside & on, coverage.where(on, 0.0), on], reduce)
        lowest = -reduce.max((-coverage).where(on, -1.0).max() if on.any() else coverage.new_tensor(-1.0)).item()
        metrics = {
            "outside_share": outside / max(count, 1.0),
            "coverage_mean": covered / count if count else 1.0,
            "coverage_min": lowest,
        }
        return Corrected(current.weight * (step.inside | ~on), on, metrics)
