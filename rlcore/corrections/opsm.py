"""Off-policy sequence masking."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from rlcore.corrections.numerics import (
    at_least_float32,
    finish,
    log_difference,
    require,
    same_shape,
    total,
)
from rlcore.corrections.specs import CorrectionSpec, Statistics
from rlcore.interfaces import Corrected, Correction, Needs, Reduce
from rlcore.lazy import torch
from rlcore.objectives.protocols import WIDE, Bias
from rlcore.spec import setting
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor


class OpsmSpec(CorrectionSpec):
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, eq. 9).

    Biased by the mask: a sequence that did badly and is far from p_inf is not made less likely."""

    method: ClassVar[str] = "rlcore.corrections.opsm:Opsm"
    statistics: ClassVar[Statistics] = {
        "masked_share": ("share", "tokens of masked sequences"),
        "kl_mean": ("nats", "mean KL estimate of a sequence"),
    }
    sequence_wise: ClassVar[bool] = True

    delta: float = setting(
        meaning="sequences with A < 0 and a mean log p_inf - log p_new above weigh 0", ge=0
    )
    target: Literal["ref", "new"] = setting("new", "ref: log p_ref instead of log p_new")

    @property
    def biases(self) -> tuple[Bias, ...]:
        return (Bias("mask", {"delta": WIDE}),)


def sequence_kl(logp_target: Tensor, logp_inf: Tensor, mask: Tensor) -> Tensor:
    """`mean_t (log p_inf - log p_target)` [B] float64 of each sequence's tokens: its k1 estimate of
    KL(p_inf || p_target). 0 for a sequence without tokens."""
    difference, usable = log_difference(logp_inf, logp_target, mask)
    # one impossible token decides, without making a mean of infinities
    summed = difference.double().clamp(-1e6, 1e6).sum(-1)
    return summed / usable.sum(-1).clamp(min=1)


def opsm(
    logp_target: Tensor, logp_inf: Tensor, advantages: Tensor, mask: Tensor, *, delta: float
) -> Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, eq. 9): weight [B, T], 0 or 1.

    0 where `A < 0` and `mean_t (log p_inf - log p_target) > delta` over the tokens of its sequence,
    else 1. Such a token stays in the loss's denominator. Biased by the mask: such sequences
    contribute nothing that would lower their probability. Log-probs and advantages [B, T], mask [B,
    T].
    """
    require(delta >= 0.0, f"delta={delta} is not accepted: it bounds a divergence, so it is >= 0.")
    same_shape(logp_target=logp_target, logp_inf=logp_inf, advantages=advantages, mask=mask)
    difference, usable = log_difference(logp_inf, logp_target, mask)
    moved = sequence_kl(logp_target, logp_inf, mask) > delta
    bad = torch.where(usable, at_least_float32(advantages), 0.0) < 0
    weight = torch.ones_like(difference).masked_fill(bad & moved[:, None], 0.0)
    return finish(weight, usable, mask)


class Opsm(Correction):
    """Weight 0 for a sequence of negative advantage whose mean `log p_inf - log p_new` exceeds
    delta (DeepSeek-V3.2, arXiv 2512.02556, eq. 9; p_ref instead of p_new with target=ref).

    It weighs by no ratio and can be combined with a correction that does. A masked token stays in
    the denominators. Biased by the mask alone: a masked sequence is not made less likely. Under
    DVP, a token outside the learner's safe set is impossible for p_new, so its sequence is masked
    where its advantage is negative. The KL is over all sampled tokens, whatever was rejected
    before.
    """

    def __init__(self, spec: OpsmSpec, run_seed: int) -> None:
        self.spec = spec
        self.needs = Needs(new=spec.target == "new")

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        target = step.logp_new if self.spec.target == "new" else step.logp_ref
        weight = opsm(target, step.logp_inf, step.advantages, step.mask, delta=self.spec.delta)
        kl = sequence_kl(target, step.logp_inf, step.mask)
        present = step.mask.any(-1)
        possible = present & (kl < 1e3)  # else DVP's impossible tokens would decide the mean alone
        masked = torch.any((weight == 0) & step.mask, dim=-1)
        hits, kl_sum, compared, count = total(
            [masked, kl.where(possible, 0.0), possible, present], reduce
        )
        metrics = {"masked_share": hits / max(count, 1.0), "kl_mean": kl_sum / max(compared, 1.0)}
        return Corrected(current.weight * weight, current.mask, metrics)
