"""M2PO: the tokens with the largest log ratios weigh 0, as many as keep the rest within a
budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rlcore.corrections.numerics import (
    SumReduce,
    finish,
    inside,
    log_difference,
    positive,
    same_shape,
    smallest_that_fit,
    total,
)
from rlcore.corrections.specs import CorrectionSpec
from rlcore.interfaces import Corrected, Correction, Needs, Reduce
from rlcore.objectives.protocols import WIDE, Bias
from rlcore.spec import setting
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor


class M2poSpec(CorrectionSpec):
    """M2PO's mask to a budget of the second moment (arXiv 2510.01161).

    Biased by the mask of what exceeds the budget."""

    method: ClassVar[str] = "rlcore.corrections.m2po:M2po"
    follows_weights: ClassVar[bool] = True

    budget: float = setting(
        0.04, "the largest (log p_ref/p_inf)^2 weigh 0 until the batch's mean is at most this", gt=0
    )

    @property
    def biases(self) -> tuple[Bias, ...]:
        return (Bias("mask", {"budget": WIDE}),)


_M2PO = M2poSpec()


def m2po(
    logp_target: Tensor,
    logp_inf: Tensor,
    mask: Tensor,
    *,
    budget: float = _M2PO.budget,
    reduce: SumReduce | None = None,
) -> Tensor:
    """M2PO's mask: weight [B, T], 0 or 1 (arXiv 2510.01161, as AReaL computes it).

    With m = (log p_target/p_inf)^2, the tokens of the largest m weigh 0 until the mean of m over
    the tokens that are left is at most the budget. Tokens of weight 0 stay in the loss's
    denominator. The mean is over all tokens of the batch, over ranks if `reduce` sums over them;
    tokens of equal m stay or go together. Biased by the mask. Log-probs and mask [B, T].
    """
    positive("budget", budget)
    same_shape(logp_target=logp_target, logp_inf=logp_inf, mask=mask)
    difference, usable = log_difference(logp_target, logp_inf, mask)
    kept = smallest_that_fit(
        difference.square(), usable, lambda counts, sums: sums <= budget * counts, reduce
    )
    return finish(kept.to(difference.dtype), usable, mask)


class M2po(Correction):
    """Weight 0 for the tokens with the largest squared log ratio, down to a mean of `budget`
    (M2PO, arXiv 2510.01161).

    It weighs by no ratio and can be combined with a correction that does. It compares the policy
    that the other correction's weights lead to: p_new under a loss without p_new/p_ref, the paper's
    form, else p_ref. The paper's ratio is not truncated.
    """

    needs = Needs(batch_stats=True)

    def __init__(self, spec: M2poSpec, run_seed: int) -> None:
        self.spec = spec

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        on = inside(step, current.mask)
        weight = m2po(step.logp_ref, step.logp_inf, on, budget=self.spec.budget, reduce=reduce)
        moment = log_difference(step.logp_ref, step.logp_inf, on)[0].square()
        masked, summed, count = total([on & (weight == 0), moment, on], reduce)
        count = max(count, 1.0)
        metrics = {"masked_share": masked / count, "second_moment": summed / count}
        return Corrected(current.weight * weight, current.mask, metrics)
