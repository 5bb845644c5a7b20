"""Truncated importance sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from rlcore.corrections.numerics import (
    TokenOrSequence,
    at_least_one,
    choice,
    finish,
    importance_ratio,
    inside,
    share,
)
from rlcore.corrections.specs import CorrectionSpec
from rlcore.interfaces import Corrected, Correction, Reduce
from rlcore.objectives.protocols import WIDE, Bias
from rlcore.spec import setting
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor


class TisSpec(CorrectionSpec):
    """Truncated importance sampling (Jackpot eq. 6; adjusted: Jackpot B.1).

    Biased by the truncation at `cap`."""

    method: ClassVar[str] = "rlcore.corrections.tis:Tis"
    weighs: ClassVar[bool] = True
    sequence_wise: ClassVar[bool] = True

    cap: float = setting(2.0, "C: weights are min(p_ref/p_inf, C)", ge=1)
    level: Literal["token", "sequence"] = setting("token", "of the ratio")
    adjusted: bool = setting(False, "min(SG(p_new)/p_inf, C), inner clip off (Jackpot B.1)")

    @property
    def inner_clip_off(self) -> str:
        return "adjusted" if self.adjusted else ""

    @property
    def corrects(self) -> Literal["token", "sequence"]:
        return self.level

    @property
    def biases(self) -> tuple[Bias, ...]:
        return (Bias("truncation", {"cap": WIDE}),)


_TIS = TisSpec()


def tis(
    logp_target: Tensor,
    logp_inf: Tensor,
    mask: Tensor,
    *,
    cap: float = _TIS.cap,
    level: TokenOrSequence = _TIS.level,
) -> Tensor:
    """Truncated importance sampling: `min(p_target/p_inf, cap)` (Jackpot eq. 6, AIS eq. 8).

    `level="sequence"` gives every token of a sequence `min(prod_t p_target/p_inf, cap)`. Biased by
    the truncation alone: a term of ratio r > cap counts cap/r of itself. Returns weight [B, T].
    """
    choice("level", level, ("token", "sequence"))
    at_least_one("cap", cap)
    weight, usable = importance_ratio(logp_target, logp_inf, mask, level)
    return finish(weight.clamp(max=cap), usable, mask)


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
