"""Policy losses. No torch at import: the configuration reads the traits of the classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcore.objectives.protocols import PolicyLoss

if TYPE_CHECKING:
    from torch import Tensor

    from rlcore.objectives.specs import ObjectiveSpec

Terms = tuple["Tensor", "dict[str, Tensor]"]
CLIP_SHARES = ("clip_low_share", "clip_high_share")


class Ppo(PolicyLoss):
    """`min(r A, clip(r, low, high) A)` (Schulman et al. 2017).

    DAPO's clip-higher is eps_high > eps_low.
    """

    inner_clip = True
    indicators = CLIP_SHARES

    def __init__(self, spec: ObjectiveSpec) -> None:
        self.low = 1.0 - spec.eps_low
        self.high = 1.0 + spec.eps_high

    def __call__(self, log_ratio: Tensor, advantages: Tensor, sampled: Tensor) -> Terms:
        return self.clipped(log_ratio.exp(), advantages)

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
    """

    inner_clip = False  # clips per sequence, which corrections cannot switch off

    def __call__(self, log_ratio: Tensor, advantages: Tensor, sampled: Tensor) -> Terms:
        lengths = sampled.sum(-1, keepdim=True).clamp(min=1)
        # log_ratio is 0 outside `sampled`, so the sum is over the sampled tokens
        mean = log_ratio.detach().sum(-1, keepdim=True) / lengths
        return self.clipped((mean + (log_ratio - log_ratio.detach())).exp(), advantages)


class Cispo(PolicyLoss):
    """`SG(clip(r, low, high)) A log p_new` (MiniMax-M1): clipped tokens keep their gradient."""

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
    """`A log p_new`, anchored at SG(p_new): only the weights correct, nothing is clipped."""

    carries_ratio = False

    def __call__(self, log_ratio: Tensor, advantages: Tensor, sampled: Tensor) -> Terms:
        # its value is 1 and its gradient that of log p_new, since the anchor is SG(p_new)
        return log_ratio.exp() * advantages, {}
