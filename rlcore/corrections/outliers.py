"""Tokens or sequences too far from the policy that sampled them weigh 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from rlcore.corrections.numerics import (
    CLAMP,
    choice,
    finish,
    inside,
    log_difference,
    positive,
    same_shape,
    total,
)
from rlcore.corrections.specs import CorrectionSpec, Statistics
from rlcore.interfaces import Corrected, Correction, Reduce
from rlcore.lazy import torch
from rlcore.objectives.protocols import WIDE, Bias
from rlcore.spec import setting
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor

Divergence = Literal["k1", "k2", "k3"]
Extent = Literal["token", "sum", "mean", "worst"]


class OutliersSpec(CorrectionSpec):
    """Rejection by divergence, whatever the weights (verl's rollout_rs).

    Biased by the mask of what exceeds the threshold."""

    method: ClassVar[str] = "rlcore.corrections.outliers:Outliers"
    statistics: ClassVar[Statistics] = {
        "masked_share": ("share", "tokens with weight 0"),
        "divergence_mean": ("nats", "mean of the divergence that tokens are judged by"),
    }
    follows_weights: ClassVar[bool] = True
    sequence_wise: ClassVar[bool] = True

    threshold: float = setting(meaning="larger divergences weigh 0", gt=0)
    divergence: Divergence = setting(
        "k3", "with d = log p_ref/p_inf: k1 |d|, k2 d^2/2, k3 exp(d) - 1 - d"
    )
    over: Extent = setting(
        "mean", "what is judged: a token, or a sequence by its sum, mean or worst token"
    )

    @property
    def biases(self) -> tuple[Bias, ...]:
        return (Bias("mask", {"threshold": WIDE}),)


_DEFAULT = OutliersSpec(threshold=1.0)


def divergences(
    logp_target: Tensor, logp_inf: Tensor, mask: Tensor, divergence: Divergence, over: Extent
) -> tuple[Tensor, Tensor]:
    """The divergence [B, T] float64 that each token is judged by, and where it is defined [B, T].

    The sum and the mean of k1 are taken over d with its sign, then in absolute value: `|sum_t d|`
    and `|mean_t d|`. The exponential of these is the sequence's ratio or its geometric mean. Log
    ratios are clamped at +-20.
    """
    choice("divergence", divergence, ("k1", "k2", "k3"))
    choice("over", over, ("token", "sum", "mean", "worst"))
    same_shape(logp_target=logp_target, logp_inf=logp_inf, mask=mask)
    difference, usable = log_difference(logp_target, logp_inf, mask)
    d = difference.double().clamp(-CLAMP, CLAMP)
    signed = divergence == "k1" and over in ("sum", "mean")
    value = d if signed else {"k1": d.abs(), "k2": d * d / 2, "k3": torch.expm1(d) - d}[divergence]
    if over == "worst":
        value = value.amax(-1, keepdim=True)
    elif over != "token":
        value = value.sum(-1, keepdim=True)
        if over == "mean":
            value = value / usable.sum(-1, keepdim=True).clamp(min=1)
    return value.abs().expand_as(difference), usable


def outliers(
    logp_target: Tensor,
    logp_inf: Tensor,
    mask: Tensor,
    *,
    threshold: float,
    divergence: Divergence = _DEFAULT.divergence,
    over: Extent = _DEFAULT.over,
) -> Tensor:
    """Weight [B, T], 0 where the divergence of the token or of its sequence is above `threshold`,
    else 1 (verl's `rollout_rs`: token_k1 to seq_max_k3).

    Such a token stays in the loss's denominator. `divergence` and `over`: see `divergences`. Biased
    by the mask. Log-probs and mask [B, T].
    """
    positive("threshold", threshold)
    value, usable = divergences(logp_target, logp_inf, mask, divergence, over)
    weight = (value <= threshold).to(logp_target.dtype)
    return finish(weight, usable, mask)


class Outliers(Correction):
    """Weight 0 for tokens or sequences whose divergence from the actor exceeds the threshold.

    It weighs by no ratio and can be combined with a correction that does, at another level: for
    example a mask by sequence with weights by token. It compares the policy that the other
    correction's weights lead to, and judges a sequence by all of its sampled tokens, whatever was
    rejected before. verl takes masked tokens out of the denominators, too; here they stay, as the
    zeros of MIS do.
    """

    def __init__(self, spec: OutliersSpec, run_seed: int) -> None:
        self.spec = spec

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        tokens = (step.logp_ref, step.logp_inf, step.mask)
        weight = outliers(*tokens, **self.spec.model_dump())
        value, _ = divergences(*tokens, self.spec.divergence, self.spec.over)
        on = inside(step, current.mask)
        masked, summed, count = total([on & (weight == 0), value.where(on, 0.0), on], reduce)
        count = max(count, 1.0)
        metrics = {"masked_share": masked / count, "divergence_mean": summed / count}
        return Corrected(current.weight * weight, current.mask, metrics)
