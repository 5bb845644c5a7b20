"""VESPO: a soft kernel of the sequence's ratio instead of a truncation."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from rlcore.corrections.numerics import (
    at_least_float32,
    finish,
    importance_ratio,
    inside,
    require,
    same_shape,
    share,
)
from rlcore.corrections.specs import CorrectionSpec, Statistics
from rlcore.interfaces import Corrected, Correction, Reduce
from rlcore.lazy import torch
from rlcore.objectives.protocols import Bias
from rlcore.spec import setting
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor


class VespSpec(CorrectionSpec):
    """VESPO's kernel of the sequence's ratio (arXiv 2602.10693).

    Biased by the kernel, which with k=1 and lam=0 is the ratio itself."""

    method: ClassVar[str] = "rlcore.corrections.vesp:Vesp"
    statistics: ClassVar[Statistics] = {
        "suppressed_share": ("share", "tokens whose kernel is below 0.5"),
    }
    weighs: ClassVar[bool] = True
    sequence_wise: ClassVar[bool] = True

    k_pos: float = setting(2.0, "A >= 0: power of the sequence's ratio", ge=0)
    lam_pos: float = setting(3.0, "A >= 0: lambda, decay with the ratio", ge=0)
    k_neg: float = setting(3.0, "A < 0: power of the sequence's ratio", ge=0)
    lam_neg: float = setting(2.0, "A < 0: lambda, decay with the ratio", ge=0)

    @property
    def corrects(self) -> Literal["token", "sequence"]:
        return "sequence"

    @property
    def biases(self) -> tuple[Bias, ...]:
        ratio_itself = {"k_pos": 1.0, "lam_pos": 0.0, "k_neg": 1.0, "lam_neg": 0.0}
        return (Bias("kernel", ratio_itself),)


_VESP = VespSpec()


def vesp(
    logp_target: Tensor,
    logp_inf: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    k_pos: float = _VESP.k_pos,
    lam_pos: float = _VESP.lam_pos,
    k_neg: float = _VESP.k_neg,
    lam_neg: float = _VESP.lam_neg,
) -> Tensor:
    """VESPO's weight [B, T] `W^k exp(lambda (1 - W))`, W = prod_t p_target/p_inf of the sequence
    (Shen et al. 2026, arXiv 2602.10693; the settings are as in the authors' code).

    k and lambda are k_pos and lam_pos where A >= 0, else k_neg and lam_neg. 1 at W = 1, at most
    `(k/lambda)^k exp(lambda - k)`, near 0 for small and for large W. log W is clamped at +-20.
    Biased by the kernel; k = 1, lambda = 0 is W. Log-probs and advantages [B, T], mask [B, T].
    """
    for name, value in (
        ("k_pos", k_pos),
        ("lam_pos", lam_pos),
        ("k_neg", k_neg),
        ("lam_neg", lam_neg),
    ):
        require(value >= 0.0, f"{name}={value} is not accepted: it must be >= 0.")
    same_shape(logp_target=logp_target, advantages=advantages)
    w, usable = importance_ratio(logp_target, logp_inf, mask, "sequence")
    good = torch.where(usable, at_least_float32(advantages), 0.0) >= 0
    k = torch.where(good, w.new_tensor(k_pos), k_neg)
    lam = torch.where(good, w.new_tensor(lam_pos), lam_neg)
    return finish((k * w.log() + lam * (1.0 - w)).exp(), usable, mask)


class Vesp(Correction):
    """Weight `W^k exp(lambda (1 - W))` of the sequence's ratio W, by the sign of A (VESPO, arXiv
    2602.10693).

    W leads to the policy that weights lead to: p_new under algorithm.loss=reinforce, the paper's
    form, else p_ref. Where the advantages of a sequence differ in sign, so do its tokens' kernels.
    """

    def __init__(self, spec: VespSpec, run_seed: int) -> None:
        self.spec = spec

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        tokens = (step.logp_ref, step.logp_inf, step.advantages, step.mask)
        weight = vesp(*tokens, **self.spec.model_dump())
        metrics = {"suppressed_share": share(weight < 0.5, inside(step, current.mask), reduce)}
        return Corrected(current.weight * weight, current.mask, metrics)
