"""DPPO: a policy gradient with its own trust region."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from rlcore.corrections.numerics import (
    CLAMP,
    at_least_float32,
    at_least_one,
    choice,
    finish,
    first_occurrence,
    inside,
    log_difference,
    positive,
    probability,
    ratio,
    require,
    same_shape,
    total,
)
from rlcore.corrections.specs import CorrectionSpec, Statistics
from rlcore.interfaces import Corrected, Correction, Needs, Reduce
from rlcore.lazy import torch
from rlcore.objectives.protocols import WIDE, Bias
from rlcore.spec import Unread, setting
from rlcore.types import StepTensors

if TYPE_CHECKING:
    from torch import Tensor


class DppoSpec(CorrectionSpec):
    """DPPO's truncated weights and trust region (arXiv 2602.04879), and DRPO's smooth one (arXiv
    2606.09821).

    Biased by the truncation at `cap`, and by the penalty, where there is one. Also biased by the
    mask outside the trust region or, with region=smooth, by the slope of weights within and beyond
    it."""

    method: ClassVar[str] = "rlcore.corrections.dppo:Dppo"
    statistics: ClassVar[Statistics] = {
        "truncated_share": ("share", "tokens whose weight is cut at its cap"),
        "masked_high_share": ("share", "tokens masked above the trust region"),
        "masked_low_share": ("share", "tokens masked below the trust region"),
        "reversed_share": ("share", "region=smooth: tokens whose update leads back"),
    }
    weighs: ClassVar[bool] = True
    leads_to_new: ClassVar[bool] = True
    sequence_wise: ClassVar[bool] = True

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(
            ("divergence", "low", "high"),
            lambda spec: spec.region == "smooth",
            "region=smooth has no threshold: its width is delta",
        ),
        Unread(("delta",), lambda spec: spec.region == "mask", "region=mask has low and high"),
    )

    region: Literal["mask", "smooth"] = setting(
        "mask", "mask: tokens that lead further out weigh 0; smooth: weights that fall and turn"
    )
    divergence: Literal["tv", "kl", "topk_tv", "topk_kl"] = setting(
        "tv",
        "between p_inf and p_new, of the sampled token against all others; topk: over the actor's "
        "stored top k and all others",
    )
    low: float = setting(0.15, "A < 0: further below p_inf weighs 0 (kl: 0.05 is usual)", ge=0)
    high: float = setting(0.15, "A > 0: further above p_inf weighs 0 (kl: 0.05 is usual)", ge=0)
    delta: float = setting(12.5, "region=smooth: width, in probability", gt=0)
    cap: float = setting(10.0, "C: weights are min(p_new/p_inf, C)", ge=1)
    penalty: float = setting(0.0, "weight of (log p_new/p_inf)^2 in the loss", ge=0)

    @property
    def needs_topk(self) -> bool:
        return self.region == "mask" and self.divergence.startswith("topk")

    @property
    def biases(self) -> tuple[Bias, ...]:
        mask = Bias("mask", {"low": WIDE, "high": WIDE})
        region = mask if self.region == "mask" else Bias("slope", {"delta": WIDE})
        penalty = (Bias("penalty", {"penalty": 0.0}),) if self.penalty else ()
        return (region, Bias("truncation", {"cap": WIDE}), *penalty)


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


def topk_divergence(
    kind: Divergence, topk_ids: Tensor, topk_logp_inf: Tensor, logp_new_at_ids: Tensor
) -> Tensor:
    """Divergence [B, T] float64 over the actor's stored top k and one bin for all other tokens.

    tv: half the L1 distance; kl: `KL(p_inf || p_new)`. Arguments [B, T, k], id -1 pads, as in
    `obrs_normalizer`. At least as large as for any coarser partition, and never above the whole
    vocabulary's. Where the sampled token is not stored it is among the others, as in the authors'
    code.
    """
    choice("divergence", kind, ("tv", "kl"))
    known = first_occurrence(topk_ids.long())
    inf, new = (
        torch.cat([p, (1.0 - p.sum(-1, keepdim=True)).clamp(min=0.0)], -1)
        for p in (probability(logp, known) for logp in (topk_logp_inf, logp_new_at_ids))
    )
    if kind == "tv":
        return (new - inf).abs().sum(-1) / 2
    return (inf * (inf.clamp(min=_TINY).log() - new.clamp(min=_TINY).log())).sum(-1)


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
    divergence: Divergence | Tensor = "tv",
    low: float = _DPPO.low,
    high: float = _DPPO.high,
) -> DppoMask:
    """Mask tokens outside the region whose update would lead further out. `divergence` [B, T]: from
    `topk_divergence`, instead of the binary divergence."""
    same_shape(logp_new=logp_new, logp_inf=logp_inf, advantages=advantages, mask=mask)
    require(low >= 0.0, f"low={low} is not accepted: it bounds a divergence, so it is >= 0.")
    require(high >= 0.0, f"high={high} is not accepted: it bounds a divergence, so it is >= 0.")
    difference, usable = log_difference(logp_new, logp_inf, mask)
    far = divergence
    if isinstance(far, str):
        far = binary_divergence(far, logp_new, logp_inf)
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
    divergence: Divergence | Tensor = "tv",
    low: float = _DPPO.low,
    high: float = _DPPO.high,
    cap: float = _DPPO.cap,
) -> Tensor:
    """Weight `min(p_new/p_inf, cap) * M` [B, T] of `A grad log p_new` (DPPO, Qi et al. 2026, arXiv
    2602.04879).

    M is 0 where a token is out of the region and the update would lead it further; else 1. That is
    `A > 0, p_new > p_inf, D > high`, or `A < 0, p_new < p_inf, D > low`, with D of
    `binary_divergence` or as given, [B, T] (`topk_divergence`). A token of weight 0 stays in the
    loss's denominator. Biased by the mask (such a token contributes nothing) and by the cap (ratio
    r above it counts cap/r). Log-probs and advantages [B, T], mask [B, T].
    """
    at_least_one("cap", cap)
    out = dppo_mask(logp_new, logp_inf, advantages, mask, divergence=divergence, low=low, high=high)
    difference, usable = log_difference(logp_new, logp_inf, mask)
    weight = ratio(difference).clamp(max=cap).masked_fill(out.high | out.low, 0.0)
    return finish(weight, usable, mask)


def drpo(
    logp_new: Tensor,
    logp_inf: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    delta: float = _DPPO.delta,
    cap: float = _DPPO.cap,
) -> Tensor:
    """Weight `min(p_new/p_inf, cap) (1 - sign(A) (p_new - p_inf)/delta)` [B, T] of `A grad log
    p_new` (DRPO, Yao et al. 2026, arXiv 2606.09821, eq. 8 and table 1).

    It is the gradient of `r A - |A|/(2 delta) p_inf (r - 1)^2`: DPPO's region of total variation.
    Its weights fall as the update leads further out, and beyond delta lead back (below 0). delta is
    12.5 in the paper, where no weight turns. The paper has no cap. Biased by the slope and the cap.
    Log-probs and advantages [B, T], mask [B, T].
    """
    at_least_one("cap", cap)
    positive("delta", delta)
    same_shape(logp_new=logp_new, logp_inf=logp_inf, advantages=advantages, mask=mask)
    difference, usable = log_difference(logp_new, logp_inf, mask)
    moved = (probability(logp_new, usable) - probability(logp_inf, usable)).to(difference)
    a = torch.where(usable, at_least_float32(advantages), 0.0)
    weight = ratio(difference).clamp(max=cap) * (1.0 - a.sign() * moved / delta)
    return finish(weight, usable, mask)


class Dppo(Correction):
    """Weight `min(p_new/p_inf, cap)`, and 0 for a token that the update would lead further out of
    the trust region (DPPO, Qi et al. 2026, arXiv 2602.04879); region=smooth: `drpo`.

    The region is around p_inf, the policy that sampled, not around p_ref, and the weights lead all
    the way to p_new. The method needs a loss that carries no ratio and has no clip
    (algorithm=dppo). Biased by the region and the cap, and by nothing else; both stay in the loss's
    denominator. `penalty` adds `penalty (log p_new/p_inf)^2` of every token to the loss, of weight
    0 or not: prime-rl's default is 1e-3, with low=high=0.2 and no cap.
    """

    def __init__(self, spec: DppoSpec, run_seed: int) -> None:
        self.spec = spec
        self.needs = Needs(new=True, topk=spec.needs_topk)

    def correct(self, step: StepTensors, current: Corrected, reduce: Reduce) -> Corrected:
        spec, tokens = self.spec, (step.logp_new, step.logp_inf, step.advantages, step.mask)
        difference, _ = log_difference(step.logp_new, step.logp_inf, step.mask)
        compared = inside(step, current.mask, "new")
        shares = {"truncated_share": ratio(difference) > spec.cap}
        if spec.region == "smooth":
            weight = drpo(*tokens, delta=spec.delta, cap=spec.cap)
            shares["reversed_share"] = weight < 0
        else:
            region: dict[str, Any] = {"low": spec.low, "high": spec.high}
            region["divergence"] = self._divergence(step)
            weight = dppo(*tokens, cap=spec.cap, **region)
            out = dppo_mask(*tokens, **region)
            shares |= {"masked_high_share": out.high, "masked_low_share": out.low}
        *found, count = total([*(which & compared for which in shares.values()), compared], reduce)
        metrics = {name: hits / max(count, 1.0) for name, hits in zip(shares, found)}
        score = None
        if spec.penalty:
            score = 2.0 * spec.penalty * difference.clamp(-CLAMP, CLAMP)
        return Corrected(current.weight * weight, current.mask, metrics, score=score)

    def _divergence(self, step: StepTensors) -> Divergence | Tensor:
        kind: Any = self.spec.divergence.removeprefix("topk_")
        if not self.spec.needs_topk:
            return kind
        stored = (step.topk_ids_inf, step.topk_logp_inf, step.new_logp_at_inf_ids)
        if any(tensor is None for tensor in stored):
            raise ValueError(
                f"correction=dppo with divergence={self.spec.divergence} needs the actor's top k "
                "and p_new on it"
            )
        return topk_divergence(kind, *stored)  # type: ignore[arg-type]
