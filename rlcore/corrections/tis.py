"""Truncated importance sampling."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from rlcore.corrections.numerics import (
    TokenOrSequence,
    at_least_one,
    choice,
    finish,
    importance_ratio,
    inside,
    require,
    share,
    total,
)
from rlcore.corrections.specs import CorrectionSpec, Statistics
from rlcore.interfaces import Corrected, Correction, Needs, Reduce
from rlcore.lazy import torch
from rlcore.objectives.protocols import WIDE, Bias
from rlcore.spec import refuse, setting
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor


class TisSpec(CorrectionSpec):
    """Truncated importance sampling (Jackpot eq. 6; adjusted: Jackpot B.1).

    Biased by the truncation at `cap` and `floor`, and with `normalised` by the batch mean, which
    for truncated ratios is not 1."""

    method: ClassVar[str] = "rlcore.corrections.tis:Tis"
    statistics: ClassVar[Statistics] = {
        "truncated_share": ("share", "tokens whose weight is cut at its cap or floor"),
        "batch_mean": ("1", "mean weight of the batch, which normalised weights are divided by"),
    }
    weighs: ClassVar[bool] = True
    sequence_wise: ClassVar[bool] = True

    cap: float = setting(2.0, "C: weights are min(p_ref/p_inf, C)", ge=1)
    floor: float = setting(0.0, "weights are at least this", ge=0, le=1)
    level: Literal["token", "sequence"] = setting("token", "of the ratio")
    normalised: bool = setting(False, "weights are divided by their mean over the batch")
    adjusted: bool = setting(False, "min(SG(p_new)/p_inf, C), inner clip off (Jackpot B.1)")
    widen_clip: bool = setting(
        False,
        "PPO's upper bound is widened where the weight is truncated, by p_ref/(C p_inf) (QuRL)",
    )

    def check(self, key: str) -> None:
        for other, used in (
            (f"{key}.adjusted=true, which has no clip", self.adjusted),
            (f"{key}.level=sequence, whose ratio is not a token's", self.level == "sequence"),
        ):
            refuse(
                self.widen_clip and used,
                f"{key}.widen_clip=true cannot be combined with {other}: use one or the other.",
            )

    @property
    def inner_clip_off(self) -> str:
        return "adjusted" if self.adjusted else ""

    @property
    def corrects(self) -> Literal["token", "sequence"]:
        return self.level

    @property
    def token_alone(self) -> bool:
        return self.level == "token" and not self.widen_clip

    @property
    def biases(self) -> tuple[Bias, ...]:
        truncation = Bias("truncation", {"cap": WIDE, "floor": 0.0})
        mean = Bias("batch mean", {"normalised": False})
        return (truncation, mean) if self.normalised else (truncation,)


_TIS = TisSpec()


def tis(
    logp_target: Tensor,
    logp_inf: Tensor,
    mask: Tensor,
    *,
    cap: float = _TIS.cap,
    floor: float = _TIS.floor,
    level: TokenOrSequence = _TIS.level,
) -> Tensor:
    """Truncated importance sampling: `max(min(p_target/p_inf, cap), floor)` (Jackpot eq. 6, AIS eq.
    8; the lower bound is slime's `tis_clip_low`).

    `level="sequence"` takes the product `prod_t p_target/p_inf` of the sequence for each of its
    tokens. Biased by the truncation alone: a term of ratio r > cap counts cap/r of itself, one of
    r < floor floor/r. Returns weight [B, T].
    """
    choice("level", level, ("token", "sequence"))
    at_least_one("cap", cap)
    require(0.0 <= floor <= 1.0, f"floor={floor} is not accepted: it is in [0, 1].")
    weight, usable = importance_ratio(logp_target, logp_inf, mask, level)
    return finish(weight.clamp(floor, cap), usable, mask)


def batch_mean(weight: Tensor, mask: Tensor, level: TokenOrSequence, reduce: Reduce) -> float:
    """Mean of the weights [B, T] over the batch's tokens that are left, or over their sequences of
    one weight each; 1 where it is 0 or there is none. Waits for the device."""
    on = mask if level == "token" else mask & (mask.cumsum(-1) == 1)
    summed, count = total([weight.where(on, 0.0), on], reduce)
    return summed / count if summed > 0 else 1.0


class Tis(Correction):
    """Weight `max(min(p_ref/p_inf, cap), floor)` per token or per sequence (Jackpot eq. 6).

    `normalised` divides the truncated weights by their mean over the batch (verl's
    `rollout_is_batch_normalize`). The mean is of all tokens or of all sequences, as the level says,
    so that a step's size does not follow the mismatch. `adjusted` switches PPO's clip off, so that
    the pipeline has weights lead to p_new: `min(SG(p_new)/p_inf, cap)` (Jackpot B.1, TIS-adjusted).
    `widen_clip` has the upper bound of PPO's clip at (1 + eps_high)/r where the advantage is
    positive, r = min(1, cap p_inf/p_ref). The truncated weight times the clipped ratio would
    otherwise be bounded below what the whole weight times it is (QuRL, arXiv 2602.13953, eq. 7 to
    9).
    """

    def __init__(self, spec: TisSpec, run_seed: int) -> None:
        self.spec = spec
        self.needs = Needs(batch_stats=spec.normalised)

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        spec = self.spec
        # step.mask, not current.mask: a sequence's product is over all of its sampled tokens
        ratios = (step.logp_ref, step.logp_inf, step.mask)
        weight = tis(*ratios, cap=spec.cap, floor=spec.floor, level=spec.level)
        ratio, _ = importance_ratio(*ratios, spec.level)
        compared = inside(step, current.mask)
        outside = (ratio > spec.cap) | (ratio < spec.floor)
        metrics = {"truncated_share": share(outside, compared, reduce)}
        mean = 1.0
        if spec.normalised:
            metrics["batch_mean"] = mean = batch_mean(weight, current.mask, spec.level, reduce)
            weight = weight / mean
        widen = (ratio / spec.cap).clamp(min=1.0) if spec.widen_clip else None

        def weigh_at(_new: Tensor, ref: Tensor, inf: Tensor) -> Tensor:
            return tis(ref, inf, torch.ones_like(inf), cap=spec.cap, floor=spec.floor) / mean

        found = Corrected(current.weight * weight, current.mask, metrics, widen=widen)
        return replace(found, weigh_at=weigh_at) if spec.token_alone else found
