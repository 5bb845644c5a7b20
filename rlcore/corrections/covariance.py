"""Clip-Cov and KL-Cov: likely tokens of large advantage are held back, since they lower the entropy
most."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rlcore.corrections.numerics import (
    CLAMP,
    SumReduce,
    at_least_float32,
    inside,
    log_difference,
    same_shape,
    share,
    smallest_that_fit,
    sums,
    token_uniforms,
)
from rlcore.corrections.specs import CorrectionSpec, Statistics
from rlcore.interfaces import Corrected, Correction, Needs, Reduce
from rlcore.lazy import torch
from rlcore.objectives.protocols import Bias
from rlcore.spec import refuse, setting
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor


class ClipCovSpec(CorrectionSpec):
    """Clip-Cov (arXiv 2505.22617).

    Biased by the mask of tokens drawn among tokens of large covariance."""

    method: ClassVar[str] = "rlcore.corrections.covariance:ClipCov"
    statistics: ClassVar[Statistics] = {
        "masked_share": ("share", "tokens with weight 0"),
        "candidate_share": ("share", "tokens with a covariance between the bounds"),
    }

    share: float = setting(2e-4, "of the batch's tokens weighs 0 (r)", ge=0, le=1)
    low: float = setting(1.0, "drawn among tokens with a covariance above this")
    high: float = setting(5.0, "and below this")

    @property
    def biases(self) -> tuple[Bias, ...]:
        return (Bias("mask", {"share": 0.0}),)

    def check(self, key: str) -> None:
        refuse(
            self.low >= self.high,
            f"{key}.low={self.low} with {key}.high={self.high} leaves no covariance between them: "
            f"{key}.low must be below {key}.high.",
        )


class KlCovSpec(CorrectionSpec):
    """KL-Cov (arXiv 2505.22617).

    Biased by the penalty, which is not of the reward."""

    method: ClassVar[str] = "rlcore.corrections.covariance:KlCov"
    around_ref: ClassVar[bool] = True
    statistics: ClassVar[Statistics] = {
        "penalised_share": ("share", "tokens with a penalty"),
    }

    share: float = setting(2e-4, "of the batch's tokens, the largest covariances (k)", ge=0, le=1)
    coef: float = setting(1.0, "weight of their KL between p_new and p_ref (beta)", ge=0)

    @property
    def biases(self) -> tuple[Bias, ...]:
        return (Bias("penalty", {"coef": 0.0}),)


def covariance(
    logp_new: Tensor, advantages: Tensor, mask: Tensor, reduce: SumReduce | None = None
) -> tuple[Tensor, Tensor]:
    """`(log p_new - mean log p_new) (A - mean A)` [B, T] float64 of each token, both means over the
    batch's tokens (arXiv 2505.22617, sec. 4), and where it is defined [B, T].

    0 where the mask is 0 or the log-prob is not finite. Over ranks if `reduce` sums over them; does
    not wait for the device.
    """
    same_shape(logp_new=logp_new, advantages=advantages, mask=mask)
    on = (mask != 0) & torch.isfinite(logp_new)
    logp, a = (torch.where(on, at_least_float32(v), 0.0).double() for v in (logp_new, advantages))
    found = sums([logp, a, on])
    logp_sum, a_sum, count = (found if reduce is None else reduce(found)).unbind()
    count = count.clamp(min=1.0)
    return torch.where(on, (logp - logp_sum / count) * (a - a_sum / count), 0.0), on


def largest_share(values: Tensor, on: Tensor, part: float, reduce: SumReduce | None) -> Tensor:
    """Mark the largest of `values` [B, T], a share `part` of the batch's tokens `on`, at least one
    unless the share is 0."""
    count = sums([on])
    most = (part * (count if reduce is None else reduce(count))).floor()
    most = most.clamp(min=1.0 if part > 0 else 0.0)
    return smallest_that_fit(-values, on, lambda counts, _: counts <= most, reduce)


class ClipCov(Correction):
    """Weight 0 for a share of the batch's tokens, drawn among tokens with a covariance between
    `low` and `high` (Clip-Cov, Cui et al. 2025, arXiv 2505.22617).

    Every candidate is drawn independently with the same probability, so that the share holds in
    expectation; the paper draws exactly as many. A masked token stays in the denominators. p_new is
    the policy before the step. Draws depend on (run seed, step, sample, position) only.
    """

    needs = Needs(new=True, batch_stats=True)

    def __init__(self, spec: ClipCovSpec, run_seed: int) -> None:
        self.spec = spec
        self.run_seed = run_seed

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        spec, on = self.spec, inside(step, current.mask, "new")
        cov, defined = covariance(step.logp_new, step.advantages, on, reduce)
        candidates = defined & (cov > spec.low) & (cov < spec.high)
        found, count = reduce(sums([candidates, defined])).unbind()
        probability = spec.share * count / found.clamp(min=1.0)
        uniforms = token_uniforms(
            self.run_seed, "clip_cov", step.step, step.sample_ids, cov.shape[1]
        )
        drawn = candidates & (uniforms < probability)
        weight = current.weight.masked_fill(drawn, 0.0)
        metrics = {
            "masked_share": share(drawn, on, reduce),
            "candidate_share": share(candidates, on, reduce),
        }
        return Corrected(weight, current.mask, metrics)


class KlCov(Correction):
    """A penalty `coef/2 (log p_new/p_ref)^2` on the share of tokens with the largest covariance
    (KL-Cov, Cui et al. 2025, arXiv 2505.22617).

    The paper's KL, by the estimate whose gradient is the reverse KL's (k2); verl's code takes
    the size of the log ratio. At the first step of a phase p_new is p_ref, and the penalty is 0.
    """

    needs = Needs(new=True, batch_stats=True)

    def __init__(self, spec: KlCovSpec, run_seed: int) -> None:
        self.spec = spec

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        spec, on = self.spec, inside(step, inside(step, current.mask), "new")
        cov, defined = covariance(step.logp_new, step.advantages, on, reduce)
        chosen = largest_share(cov, defined, spec.share, reduce)
        difference, _ = log_difference(step.logp_new, step.logp_ref, chosen)
        score = spec.coef * difference.clamp(-CLAMP, CLAMP)
        metrics = {"penalised_share": share(chosen, on, reduce)}
        return Corrected(current.weight, current.mask, metrics, score=score)
