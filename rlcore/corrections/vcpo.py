"""VCPO: steps as large as the effective sample size warrants."""

from __future__ import annotations

from rlcore.corrections.formulas.step_size import (
    sequence_ess,
    sequence_ess_accumulate,
    vcpo_scale,
)
from rlcore.corrections.specs import VcpoSpec
from rlcore.interfaces import Corrected, Correction, Needs, Reduce
from rlcore.types import StepTensors


class Vcpo(Correction):
    """Multiplies the step's learning rate by `sqrt(ESS / (base n))`, at most 1, with `ESS = (sum
    w)^2 / sum w^2` over the n sequences of the global batch and `w = prod_t p_new/p_inf` (VCPO,
    arXiv 2602.17616, section 4.1; p_ref in the place of p_new with target=ref).

    Weights and mask stay: the expected gradient is what it was, and a step of few effective
    samples is short. Goes beside any correction; the sequences are those that enter the pipeline,
    whatever is rejected later. The rate's schedule never sees the factor, which depends on the
    step's batch alone: there is no state, and a resumed step takes the same one. Under AdamW the
    decay of that step is scaled too. Every rank computes it from the same reduced sums. The paper's
    other half, a baseline that takes the norm of every sample's gradient, is not here.
    """

    def __init__(self, spec: VcpoSpec, run_seed: int) -> None:
        self.spec = spec
        self.needs = Needs(new=spec.target == "new")

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        spec = self.spec
        target = step.logp_new if spec.target == "new" else step.logp_ref
        summed = reduce(sequence_ess_accumulate(target, step.logp_inf, step.mask, cap=spec.cap))
        ess = sequence_ess(summed)
        scale = vcpo_scale(ess, rule=spec.rule, base=spec.base)
        metrics = {"ess": ess, "step_scale": scale}
        return Corrected(current.weight, current.mask, metrics, step_scale=scale)
