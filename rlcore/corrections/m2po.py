"""M2PO: the tokens with the largest log ratios weigh 0, as many as keep the rest within a
budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from rlcore.corrections.numerics import (
    InvalidArgument,
    SumReduce,
    at_least_float32,
    choice,
    finish,
    inside,
    log_difference,
    positive,
    same_shape,
    smallest_that_fit,
    total,
)
from rlcore.corrections.specs import CorrectionSpec, Statistics
from rlcore.interfaces import Corrected, Correction, Needs, Reduce
from rlcore.lazy import torch
from rlcore.objectives.kl import CLAMP
from rlcore.objectives.protocols import WIDE, Bias
from rlcore.spec import setting
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor

Over = Literal["all", "harmful"]


class M2poSpec(CorrectionSpec):
    """M2PO's mask to a budget of the second moment (arXiv 2510.01161).

    Biased by the mask of what exceeds the budget."""

    method: ClassVar[str] = "rlcore.corrections.m2po:M2po"
    statistics: ClassVar[Statistics] = {
        "masked_share": ("share", "tokens with weight 0"),
        "second_moment": ("nats^2", "mean squared log ratio before the mask"),
    }
    follows_weights: ClassVar[bool] = True

    budget: float = setting(
        0.04, "the largest (log p_ref/p_inf)^2 weigh 0 until the batch's mean is at most this", gt=0
    )
    over: Over = setting(
        "all",
        "the tokens that are masked and that the mean is over; harmful (the paper's): tokens that "
        "PPO's clip would stop",
    )

    @property
    def biases(self) -> tuple[Bias, ...]:
        return (Bias("mask", {"budget": WIDE}),)


_M2PO = M2poSpec()


def harmful(difference: Tensor, advantages: Tensor) -> Tensor:
    """[B, T] bool: tokens that have moved from p_inf in the direction of their advantage. They have
    A > 0 and a log ratio above 0, or A < 0 and one below 0. More of the same is what a trust region
    stops."""
    return at_least_float32(advantages) * difference.sign() > 0


def m2po(
    logp_target: Tensor,
    logp_inf: Tensor,
    mask: Tensor,
    *,
    budget: float = _M2PO.budget,
    over: Over = _M2PO.over,
    advantages: Tensor | None = None,
    reduce: SumReduce | None = None,
) -> Tensor:
    """M2PO's mask: weight [B, T], 0 or 1 (arXiv 2510.01161).

    With m = (log p_target/p_inf)^2, the tokens of the largest m weigh 0 until the mean of m over
    the tokens that are left is at most the budget. The mean is over all tokens (as AReaL computes
    it) or over the `harmful` ones, which needs `advantages` [B, T] and leaves all others alone. The
    latter is the paper's Algorithm 1, whose trust-region tokens are these in the authors' code.
    Tokens of weight 0 stay in the loss's denominator. The mean is over the batch, over ranks if
    `reduce` sums over them; tokens of equal m stay or go together. Biased by the mask. Log-probs
    and mask [B, T].
    """
    positive("budget", budget)
    choice("over", over, ("all", "harmful"))
    same_shape(logp_target=logp_target, logp_inf=logp_inf, mask=mask)
    difference, usable = log_difference(logp_target, logp_inf, mask)
    judged = usable
    if over == "harmful":
        if advantages is None:
            raise InvalidArgument("over=harmful is not accepted without the tokens' advantages.")
        same_shape(logp_inf=logp_inf, advantages=advantages)
        judged = usable & harmful(difference, advantages)
    kept = smallest_that_fit(
        difference.square(), judged, lambda counts, sums: sums <= budget * counts, reduce
    )
    return finish((kept | ~judged).to(difference.dtype), usable, mask)


class M2po(Correction):
    """Weight 0 for the tokens with the largest squared log ratio, down to a mean of `budget`
    (M2PO, arXiv 2510.01161).

    It weighs by no ratio and can be combined with a correction that does. It compares the policy
    that the other correction's weights lead to: p_new under a loss without p_new/p_ref, the paper's
    form, else p_ref. The paper's ratio is not truncated. With `over=harmful` advantages have their
    say: it is the paper's Algorithm 1.
    """

    needs = Needs(batch_stats=True)

    def __init__(self, spec: M2poSpec, run_seed: int) -> None:
        self.spec = spec

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        on = inside(step, current.mask)
        weight = m2po(
            step.logp_ref,
            step.logp_inf,
            on,
            budget=self.spec.budget,
            over=self.spec.over,
            advantages=step.advantages,
            reduce=reduce,
        )
        # outside the safe set of the policy that is compared the log ratio is infinite: the largest
        weight = weight.where(on | ~current.mask, 0.0)
        difference, judged = log_difference(step.logp_ref, step.logp_inf, on)
        if self.spec.over == "harmful":
            judged = judged & harmful(difference, step.advantages)
        # a token that p_ref cannot sample has an infinite ratio, clamped like every ratio
        moment = torch.where(judged, difference.clamp(-CLAMP, CLAMP).square(), 0.0)
        masked, summed, having, count = total([on & (weight == 0), moment, judged, on], reduce)
        metrics = {
            "masked_share": masked / max(count, 1.0),
            "second_moment": summed / max(having, 1.0),
        }
        return Corrected(current.weight * weight, current.mask, metrics)
