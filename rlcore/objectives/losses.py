"""Policy losses. No torch at import: the configuration reads the traits of the classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rlcore.objectives.bias import WIDE, Bias
from rlcore.objectives.protocols import PolicyLoss

if TYPE_CHECKING:
    from torch import Tensor

    from rlcore.objectives.specs import ObjectiveSpec

Terms = tuple["Tensor", "dict[str, Tensor]"]
CLIP_SHARES = ("clip_low_share", "clip_high_share")
CLIP = Bias("clip", {"eps_low": WIDE, "eps_high": WIDE})


class Ppo(PolicyLoss):
    """`f = min(r A, clip(r, low, high) A)` (Schulman et al. 2017).

    DAPO's clip-higher is eps_high > eps_low. With `dual_clip` c, `max(f, c A)` where A < 0 (Ye et
    al. 2020, arXiv 1912.09729, eq. 5): f alone falls without bound as r grows there.

    Biased by the clips: a token beyond one of them has no gradient (`clip_*_share`,
    `dual_clip_share`). The clip binds where r is above `high` and A > 0, or below `low` and A < 0,
    the dual clip where r is above c and A < 0. Not biased while r stays within all of them.
    """

    inner_clip = True
    clips = True
    biases = (CLIP, Bias("dual clip", {"dual_clip": None}))
    own_settings: ClassVar[tuple[str, ...]] = ("dual_clip",)
    indicators: tuple[str, ...] = CLIP_SHARES

    def __init__(self, spec: ObjectiveSpec) -> None:
        self.low = 1.0 - spec.eps_low
        self.high = 1.0 + spec.eps_high
        self.dual = spec.dual_clip
        if self.dual is not None:
            self.indicators = (*CLIP_SHARES, "dual_clip_share")

    def __call__(self, log_ratio: Tensor, advantages: Tensor, sampled: Tensor) -> Terms:
        ratio = log_ratio.exp()
        objective, indicators = self.clipped(ratio, advantages)
        if self.dual is None:
            return objective, indicators
        bounded = objective.maximum(self.dual * advantages)
        indicators["dual_clip_share"] = (ratio.detach() > self.dual) & (advantages < 0)
        return bounded.where(advantages < 0, objective), indicators

    def clipped(self, ratio: Tensor, advantages: Tensor) -> Terms:
        """The objective of a ratio [B, T], and where it is clipped."""
        objective = (ratio * advantages).minimum(ratio.clamp(self.low, self.high) * advantages)
        detached = ratio.detach()
        return objective, {
            "clip_low_share": (detached < self.low) & (advantages < 0),
            "clip_high_share": (detached > self.high) & (advantages > 0),
        }


class Gspo(Ppo):
    """PPO's clip on the geometric mean of the sequence's token ratios (Zheng et al. 2025, eq. 7).

    The mean is over every sampled token of the sequence: over those that a correction kept it
    would be biased by their selection. In the paper's token form, `SG(s) p_new/SG(p_new)`: each
    token carries its own gradient, so that a weight per token weighs that token; with equal weights
    the gradient is that of s itself.

    Biased by the clip (`clip_*_share`), and by design: the geometric mean s is the sequence's own
    ratio to the power 1/length, so that beyond the first step of a phase it undercorrects; at s = 1
    it is exact.
    """

    inner_clip = False  # clips per sequence, which corrections cannot switch off
    biases = (CLIP, Bias("geometric mean", where="one token"))
    own_settings = ()

    def __call__(self, log_ratio: Tensor, advantages: Tensor, sampled: Tensor) -> Terms:
        lengths = sampled.sum(-1, keepdim=True).clamp(min=1)
        # log_ratio is 0 outside `sampled`, so the sum is over the sampled tokens
        mean = log_ratio.detach().sum(-1, keepdim=True) / lengths
        return self.clipped((mean + (log_ratio - log_ratio.detach())).exp(), advantages)


class Cispo(PolicyLoss):
    """`SG(clip(r, low, high)) A log p_new` (MiniMax-M1): clipped tokens keep their gradient.

    Biased by the clip of the weight alone: a token of ratio r above `high` counts high/r of itself,
    one below `low` low/r.
    """

    clips = True
    biases = (CLIP,)
    indicators = CLIP_SHARES

    def __init__(self, spec: ObjectiveSpec) -> None:
        self.low = 1.0 - spec.eps_low
        self.high = 1.0 + spec.eps_high

    def __call__(self, log_ratio: Tensor, advantages: Tensor, sampled: Tensor) -> Terms:
        ratio = log_ratio.detach().exp()
        # 1 + (log r - SG(log r)) in place of log p_new: the same gradient, and a readable value
        score = 1.0 + (log_ratio - log_ratio.detach())
        return ratio.clamp(self.low, self.high) * advantages * score, {
            "clip_low_share": ratio < self.low,
            "clip_high_share": ratio > self.high,
        }


class Reinforce(PolicyLoss):
    """`A log p_new`, anchored at SG(p_new): only the weights correct, nothing is clipped.

    Not biased by itself: what the weights leave uncorrected is its bias.
    """

    carries_ratio = False

    def __call__(self, log_ratio: Tensor, advantages: Tensor, sampled: Tensor) -> Terms:
        # its value is 1 and its gradient that of log p_new, since the anchor is SG(p_new)
        return log_ratio.exp() * advantages, {}
