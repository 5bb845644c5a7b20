"""Masked importance sampling, and IcePop, which is masked importance sampling per token with other
default bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from rlcore.corrections.numerics import Level, finish, importance_ratio, inside, require, share
from rlcore.corrections.specs import CorrectionSpec, Statistics
from rlcore.interfaces import Corrected, Correction, Reduce
from rlcore.lazy import torch
from rlcore.objectives.protocols import WIDE, Bias
from rlcore.spec import setting
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor


class MisSpec(CorrectionSpec):
    """Masked importance sampling (DVP section 6).

    Biased by the mask outside [low, high]; level=geometric also by the geometric mean, which is the
    ratio of no sequence longer than one token."""

    method: ClassVar[str] = "rlcore.corrections.mis:Mis"
    statistics: ClassVar[Statistics] = {"masked_share": ("share", "tokens with weight 0")}
    weighs: ClassVar[bool] = True
    sequence_wise: ClassVar[bool] = True

    low: float = setting(0.5, "ratios below weigh 0", ge=0, le=1)
    high: float = setting(2.0, "ratios above weigh 0", ge=1)
    level: Literal["token", "sequence", "geometric"] = setting("token", "of the ratio")

    @property
    def token_alone(self) -> bool:
        return self.level == "token"

    @property
    def corrects(self) -> Literal["token", "sequence"]:
        return "token" if self.level == "token" else "sequence"

    @property
    def biases(self) -> tuple[Bias, ...]:
        mask = Bias("mask", {"low": 0.0, "high": WIDE})
        geometric = Bias("geometric mean", where="one token")
        return (mask, geometric) if self.level == "geometric" else (mask,)


class IcePopSpec(MisSpec):
    """`mis` with the bounds of DistillSparse 2.1, and metrics under its own name.

    Biased as `mis`: by the mask outside [low, high], with level=geometric by the geometric mean."""

    high: float = setting(5.0, "ratios above weigh 0", ge=1)


_MIS = MisSpec()


def mis(
    logp_target: Tensor,
    logp_inf: Tensor,
    mask: Tensor,
    *,
    low: float,
    high: float,
    level: Level = _MIS.level,
) -> Tensor:
    """Masked importance sampling: the ratio where it lies in `[low, high]`, both ends included,
    else 0 (DVP sec. 6).

    At the sequence levels the product or the geometric mean is compared, and is the weight of every
    token of the sequence. IcePop (DistillSparse 2.1) is this at token level with 0.5 and 5. A zero
    weight stays in the loss's denominator: the estimator is the importance-weighted mean with large
    and small terms set to 0, which is its bias. Returns weight [B, T].
    """
    require(0.0 <= low <= high, f"low={low}, high={high} is not accepted: 0 <= low <= high.")
    weight, usable = importance_ratio(logp_target, logp_inf, mask, level)
    inside = (weight >= low) & (weight <= high)
    return finish(torch.where(inside, weight, torch.zeros_like(weight)), usable, mask)


class Mis(Correction):
    """Weight `p_ref/p_inf` where it lies in `[low, high]`, else 0; per token, sequence or geometric
    mean (DVP sec. 6).

    A zero weight stays in the loss's denominator: the term is set to 0, the mean is still over all
    tokens.
    """

    def __init__(self, spec: MisSpec, run_seed: int) -> None:
        self.spec = spec

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        spec = self.spec
        # step.mask, not current.mask: a sequence's product is over all of its sampled tokens
        weight = mis(
            step.logp_ref, step.logp_inf, step.mask, low=spec.low, high=spec.high, level=spec.level
        )
        metrics = {"masked_share": share(weight == 0, inside(step, current.mask), reduce)}
        at = self._at if spec.token_alone else None
        return Corrected(current.weight * weight, current.mask, metrics, weigh_at=at)

    def _at(self, _new: Tensor, ref: Tensor, inf: Tensor) -> Tensor:
        return mis(ref, inf, torch.ones_like(inf), low=self.spec.low, high=self.spec.high)
