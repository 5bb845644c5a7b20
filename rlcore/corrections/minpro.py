"""MinPRO: the smallest ratio of the prefix replaces the product of its ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rlcore.corrections.numerics import (
    at_least_one,
    finish,
    inside,
    log_difference,
    ratio,
    same_shape,
    share,
)
from rlcore.corrections.specs import CorrectionSpec, Statistics
from rlcore.interfaces import Corrected, Correction, Reduce
from rlcore.lazy import torch
from rlcore.objectives.protocols import WIDE, Bias
from rlcore.spec import setting
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor


class MinproSpec(CorrectionSpec):
    """Minimum prefix ratio (MinPRO, arXiv 2601.22718).

    Biased by the truncation at `cap`, and by the prefix minimum, which is not a ratio of the prefix
    unless that is empty."""

    method: ClassVar[str] = "rlcore.corrections.minpro:Minpro"
    statistics: ClassVar[Statistics] = {
        "truncated_share": ("share", "tokens whose weight is cut at its cap"),
    }
    weighs: ClassVar[bool] = True
    sequence_wise: ClassVar[bool] = True

    cap: float = setting(2.0, "C: weights are min(rho_t min_{j<t} rho_j, C)", ge=1)

    @property
    def biases(self) -> tuple[Bias, ...]:
        return (Bias("truncation", {"cap": WIDE}), Bias("prefix minimum", where="one token"))


_MINPRO = MinproSpec()


def prefix_minimum(logp_target: Tensor, logp_inf: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`log(rho_t min_{j<t} rho_j)` [B, T] of each token, rho = p_target/p_inf, and where it is
    defined [B, T]. The first token of a sequence has no prefix: log rho."""
    same_shape(logp_target=logp_target, logp_inf=logp_inf, mask=mask)
    difference, usable = log_difference(logp_target, logp_inf, mask)
    lowest = difference.masked_fill(~usable, torch.inf).cummin(-1).values
    before = torch.cat([torch.full_like(lowest[:, :1], torch.inf), lowest[:, :-1]], -1)
    return difference + before.masked_fill(before == torch.inf, 0.0), usable


def minpro(
    logp_target: Tensor, logp_inf: Tensor, mask: Tensor, *, cap: float = _MINPRO.cap
) -> Tensor:
    """MinPRO's weight [B, T] `min(rho_t min_{j<t} rho_j, cap)`, rho = p_target/p_inf.

    The ratio of a prefix and its next token is `prod_{j<=t} rho_j`; the minimum over the tokens
    before t replaces their product (Lei et al. 2026, arXiv 2601.22718, whose abstract defines it;
    its equations were not at hand, so the truncation is TIS's). Biased by both. Log-probs and mask
    [B, T].
    """
    at_least_one("cap", cap)
    weight, usable = prefix_minimum(logp_target, logp_inf, mask)
    return finish(ratio(weight).clamp(max=cap), usable, mask)


class Minpro(Correction):
    """Weight `min(rho_t min_{j<t} rho_j, cap)`, rho = p_ref/p_inf (MinPRO, arXiv 2601.22718).

    The minimum is over all sampled tokens before t, whatever an earlier correction rejected.
    """

    def __init__(self, spec: MinproSpec, run_seed: int) -> None:
        self.spec = spec

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        tokens = (step.logp_ref, step.logp_inf, step.mask)
        weight = minpro(*tokens, cap=self.spec.cap)
        over = ratio(prefix_minimum(*tokens)[0]) > self.spec.cap
        metrics = {"truncated_share": share(over, inside(step, current.mask), reduce)}
        return Corrected(current.weight * weight, current.mask, metrics)
