"""Dynamic vocabulary pruning: actor and learner both exclude extremely unlikely tokens."""

from __future__ import annotations

from dataclasses import replace

from rlcore.corrections.formulas.numerics import total
from rlcore.corrections.specs import DvpSpec
from rlcore.interfaces import Corrected, Correction, Needs, Reduce
from rlcore.types import SamplingSpec, StepTensors


class Dvp(Correction):
    """The actor samples with min-p = rho, the learner's log-probs are over its own safe set (DVP
    section 5).

    A sampled token outside the learner's safe set has ratio 0: weight 0, still in the denominator,
    and its whole sequence is dropped by sequence-level weights or a veto. With `zero=trajectory`
    every token of its sequence weighs 0, as in equation 22, whose ratio is of the whole trajectory.
    The ratio of the two constrained policies is left to another correction (none, TIS, MIS, ...).

    Both estimate the gradient of the constrained policies, which is the bias that the method
    accepts. Beyond that, `token` is exact with weights per token (prefix and rest from the actor),
    `trajectory` with weights per sequence; with weights per token it loses what came before and
    after such a token, `sequence_outside_share` of the sequences.
    """

    def __init__(self, spec: DvpSpec, run_seed: int) -> None:
        self.spec = spec
        self.needs = Needs(safe_set_rho=spec.rho)

    def constrain_sampling(self, sampling: SamplingSpec) -> SamplingSpec:
        return replace(sampling, min_p=max(sampling.min_p, self.spec.rho))

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        if step.inside is None or step.coverage is None:
            raise ValueError(
                "correction=dvp needs StepTensors.inside and .coverage: the learner applied no "
                "safe set"
            )
        on = current.mask
        coverage = step.coverage.float().clamp(0, 1)
        left = (step.mask & ~step.inside).any(-1)
        outside, covered, count, sequences, present = total(
            [~step.inside & on, coverage.where(on, 0.0), on, left, step.mask.any(-1)], reduce
        )
        # a rank without tokens must not decide the minimum, and still takes part in the reduction
        lowest = (-coverage).where(on, -1.0).max() if on.any() else coverage.new_tensor(-1.0)
        metrics = {
            "outside_share": outside / max(count, 1.0),
            "sequence_outside_share": sequences / max(present, 1.0),
            "coverage_mean": covered / count if count else 1.0,
            "coverage_min": -reduce.max(lowest).item(),
        }
        stays = step.inside | ~on
        if self.spec.zero == "trajectory":
            stays = stays & ~left[:, None]
        return Corrected(current.weight * stays, on, metrics)
