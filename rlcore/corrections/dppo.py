"""DPPO: a policy gradient with its own trust region."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from rlcore.corrections.numerics import (
    CLAMP,
    at_least_float32,
    at_least_one,
    choice,
    finish,
    inside,
    log_difference,
    ratio,
    require,
    same_shape,
    total,
)
from rlcore.corrections.specs import CorrectionSpec
from rlcore.interfaces import Corrected, Correction, Needs, Reduce
from rlcore.lazy import torch
from rlcore.objectives.protocols import WIDE, Bias
from rlcore.spec import setting
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor


class DppoSpec(CorrectionSpec):
    """DPPO's truncated weights and trust region (arXiv 2602.04879).

    Biased by the truncation at `cap` and by the mask outside the trust region."""

    method: ClassVar[str] = "rlcore.corrections.dppo:Dppo"
    weighs: ClassVar[bool] = True
    leads_to_new: ClassVar[bool] = True
    sequence_wise: ClassVar[bool] = True

    divergence: Literal["tv", "kl"] = setting(
        "tv", "of the sampled token against all others, between p_inf and p_new"
    )
    low: float = setting(0.15, "A < 0: further below p_inf weighs 0 (kl: 0.05 is usual)", ge=0)
    high: float = setting(0.15, "A > 0: further above p_inf weighs 0 (kl: 0.05 is usual)", ge=0)
    cap: float = setting(10.0, "C: weights are min(p_new/p_inf, C)", ge=1)

    @property
    def biases(self) -> tuple[Bias, ...]:
        region = Bias("mask", {"low": WIDE, "high": WIDE})
        return (region, Bias("truncation", {"cap": WIDE}))


Divergence = Literal["tv", "kl"]
_DPPO = DppoSpec()
_TINY = 1e-8  # probability of all other tokens, at least: keeps its logarithm finite


def binary_divergence(kind: Divergence, logp_new: Tensor, logp_inf: Tensor) -> Tensor:
    """Divergence [B, T] float64 of the sampled token against all others.

    tv: `|p_new - p_inf|`, half the L1 distance of the two binary distributions. kl: `KL(p_inf ||
    p_new)` between them. Neither is above the divergence over the whole vocabulary.
    """
    choice("divergence", kind, ("tv", "kl"))
    logp_new, logp_inf = logp_new.detach().double(), logp_inf.detach().double()
    new, inf = logp_new.exp(), logp_inf.exp()
    if kind == "tv":
        return (new - inf).abs()
    others = [(1.0 - p).clamp(min=_TINY).log() for p in (inf, new)]
    drawn = inf * (logp_inf - logp_new).clamp(-CLAMP, CLAMP)
    return drawn + (1.0 - inf).clamp(min=0.0) * (others[0] - others[1])


class DppoMask(NamedTuple):
    """The tokens that the trust region takes out, [B, T] bool."""

    high: Tensor  # A > 0 and p_new above p_inf by more than the region
    low: Tensor  # A < 0 and p_new below p_inf by more


def dppo_mask(
    logp_new: Tensor,
    logp_inf: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    divergence: Divergence = _DPPO.divergence,
    low: float = _DPPO.low,
    high: float = _DPPO.high,
) -> DppoMask:
    """Tokens outside the region whose update would lead further out."""
    same_shape(logp_new=logp_new, logp_inf=logp_inf, advantages=advantages, mask=mask)
    require(low >= 0.0, f"low={low} is not accepted: it bounds a divergence, so it is >= 0.")
    require(high >= 0.0, f"high={high} is not accepted: it bounds a divergence, so it is >= 0.")
    difference, usable = log_difference(logp_new, logp_inf, mask)
    far = binary_divergence(divergence, logp_new, logp_inf)
    a = torch.where(usable, at_least_float32(advantages), 0.0)
    return DppoMask(
        high=(a > 0) & (difference > 0) & (far > high),
        low=(a < 0) & (difference < 0) & (far > low),
    )


def dppo(
    logp_new: Tensor,
    logp_inf: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    divergence: Divergence = _DPPO.divergence,
    low: float = _DPPO.low,
    high: float = _DPPO.high,
    cap: float = _DPPO.cap,
) -> Tensor:
    """Weight `min(p_new/p_inf, cap) * M` [B, T] of `A grad log p_new` (DPPO, Qi et al. 2026, arXiv
    2602.04879).

    M is 0 where a token is out of the region and the update would lead it further: `A > 0, p_new >
    p_inf, D > high`, or `A < 0, p_new < p_inf, D > low`, D of `binary_divergence`; else 1. A token
    of weight 0 stays in the loss's denominator. Biased by the mask (such a token contributes
    nothing) and by the cap (ratio r above it counts cap/r). Log-probs and advantages [B, T], mask
    [B, T].
    """
    at_least_one("cap", cap)
    out = dppo_mask(logp_new, logp_inf, advantages, mask, divergence=divergence, low=low, high=high)
    difference, usable = log_difference(logp_new, logp_inf, mask)
    weight = ratio(difference).clamp(max=cap).masked_fill(out.high | out.low, 0.0)
    return finish(weight, usable, mask)


class Dppo(Correction):
    """Weight `min(p_new/p_inf, cap)`, and 0 for a token that the update would lead further out of
    the trust region (DPPO, Qi et al. 2026, arXiv 2602.04879).

    The region is around p_inf, which was sampled from, not p_ref, and the weights lead all the way
    to p_new: it needs a loss that carries no ratio and has no clip (algorithm=dppo). Biased by the
    mask and the cap, and by nothing else; both stay in the loss's denominator.
    """

    needs = Needs(new=True)

    def __init__(self, spec: DppoSpec, run_seed: int) -> None:
        self.spec = spec

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        spec, tokens = self.spec, (step.logp_new, step.logp_inf, step.advantages, step.mask)
        region: dict[str, Any] = {"divergence": spec.divergence, "low": spec.low, "high": spec.high}
        weight = dppo(*tokens, cap=spec.cap, **region)
        out = dppo_mask(*tokens, **region)
        compared = inside(step, current.mask, "new")
        over = ratio(log_difference(step.logp_new, step.logp_inf, step.mask)[0]) > spec.cap
        high, low, truncated, count = total(
            [*(which & compared for which in (out.high, out.low, over)), compared], reduce
        )
        count = max(count, 1.0)
        metrics = {
            "masked_high_share": high / count,
            "masked_low_share": low / count,
            "truncated_share": truncated / count,
        }
        return Corrected(current.weight * weight, current.mask, metrics)
