"""Policy losses, one class each. No torch at import, since the configuration reads class
attributes."""

from __future__ import annotations

from math import inf, log
from typing import TYPE_CHECKING, ClassVar

from rlcore.interfaces import Reduce
from rlcore.lazy import torch
from rlcore.objectives.kl import CLAMP, at_least_float32
from rlcore.objectives.protocols import WIDE, Bias, LossTensors, PolicyLoss
from rlcore.objectives.specs import Aggregation

if TYPE_CHECKING:
    from torch import Tensor

    from rlcore.objectives.specs import ObjectiveSpec


def policy_loss(
    loss: PolicyLoss, tokens: LossTensors, *, short_circuit: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """`-SG(weight) * objective` [B, T], and indicators [B, T] by name; 0 where the mask is 0.

    A `score` adds the gradient of `SG(score) log p_new`, and nothing to the value. `widen` w makes
    the upper bound of a clip h the bound of w h where A > 0, since `min(r, w h) A = w min(r / w, h)
    A`.

    With `short_circuit` the ratio is `p_new/SG(p_new)`: its value is 1, so no clip ever binds
    (TIS-adjusted and Jackpot B.1). Indicators are the loss's, and `ratio`; the mean of each
    over the global mask is the metric of that name.
    """
    on = tokens.mask != 0
    logp_new = at_least_float32(tokens.logp_new)
    anchored = short_circuit or not loss.carries_ratio
    anchor = logp_new.detach() if anchored else at_least_float32(tokens.logp_ref.detach())
    # A kept token that is NaN must show; a rejected one counts for a sequence's ratio only where
    # its own is defined.
    defined = on | torch.isfinite(logp_new.detach() - anchor)
    counted = (tokens.sampled != 0) & defined
    log_ratio = torch.where(counted, logp_new - anchor, 0.0).clamp(-CLAMP, CLAMP)
    # a rejected token is on the side of a sequence's clip that its advantage says
    own = at_least_float32(tokens.advantages.detach())
    advantages = torch.where(on | counted, own, 0.0)
    weight = torch.where(on, at_least_float32(tokens.weight.detach()), 0.0)
    clipped = log_ratio
    if tokens.widen is not None:
        widened = on & counted & (advantages > 0)
        wider = torch.where(widened, tokens.widen.detach().to(weight), 1.0)
        clipped, weight = log_ratio - wider.log(), weight * wider
    objective, indicators = loss(clipped, advantages, counted)
    indicators["ratio"] = log_ratio.detach().exp()
    per_token = -weight * objective
    if tokens.score is not None:
        score = torch.where(on, at_least_float32(tokens.score.detach()), 0.0)
        per_token = per_token + score * (log_ratio - log_ratio.detach())
    return per_token, {
        name: torch.where(on, value, 0.0).to(weight.dtype) for name, value in indicators.items()
    }


# From per-token losses to one number: coefficients that do not depend on micro-batches or ranks.
#
# `loss = sum(coefficients * per_token_loss)` over all ranks and micro-batches. The counts are of
# the whole step over all ranks, so any split of the sequences into micro-batches adds up to the
# same loss. The mask is the one after rejection, so a token mean divides by the kept tokens (see
# `rlcore.corrections.jackpot` for why that is right).


def counts(mask: Tensor, reduce: Reduce) -> tuple[int, int]:
    """Kept tokens, and sequences with at least one, of the whole step over all ranks.

    `mask` [B, T] is the rank's.
    """
    on = mask != 0
    tokens, sequences = reduce(torch.stack([on.sum(), on.any(-1).sum()]).double()).tolist()
    return int(tokens), int(sequences)


def coefficients(
    mode: Aggregation, mask: Tensor, global_tokens: int, global_sequences: int, max_len: int
) -> Tensor:
    """Coefficient [B, T] float32 of each token's loss; 0 where the mask is 0.

    token-mean: 1/global_tokens. seq-mean-token-mean: 1/(tokens of its sequence * global_sequences).
    seq-mean-token-sum-norm: 1/(max_len * global_sequences), `max_len` a constant of the run (Dr.
    GRPO). Rows are whole sequences.
    """
    on = (mask != 0).float()
    if mode == "token-mean":
        return on / max(global_tokens, 1)
    if mode == "seq-mean-token-mean":
        return on / (on.sum(-1, keepdim=True).clamp(min=1) * max(global_sequences, 1))
    return on / (max_len * max(global_sequences, 1))


Terms = tuple["Tensor", "dict[str, Tensor]"]
CLIP_SHARES = ("clip_low_share", "clip_high_share")
CLIP = Bias("clip", {"eps_low": WIDE, "eps_high": WIDE})


class Ppo(PolicyLoss):
    """`f = min(r A, clip(r, low, high) A)` (Schulman et al. 2017).

    DAPO's clip-higher is eps_high > eps_low. With `dual_clip` c, `max(f, c A)` where A < 0 (Ye et
    al. 2020, arXiv 1912.09729, eq. 5): without it f falls without bound as r grows.

    Biased by the clips: a token beyond one of them has no gradient (`clip_*_share`,
    `dual_clip_share`). The clip binds where r is above `high` and A > 0, or below `low` and A < 0.
    The dual clip binds where r is above c and A < 0. Not biased while r stays within all of them.
    """

    inner_clip = True
    clips = True
    token_wise = True
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

    The mean is over every sampled token of the sequence: a mean over the tokens that a correction
    kept would be biased by their selection. The paper's token form is used, `SG(s)
    p_new/SG(p_new)`. Each token carries its own gradient, so that a weight per token weighs that
    token; with equal weights the gradient is s's own.

    Biased by the clip (`clip_*_share`), and by design. The geometric mean s is the sequence's own
    ratio to the power 1/length, so that it undercorrects beyond the first step of a phase; at s = 1
    it is exact.
    """

    inner_clip = False  # clips per sequence, which corrections cannot switch off
    token_wise = False
    biases = (CLIP, Bias("geometric mean", where="one token"))
    own_settings = ()

    def __call__(self, log_ratio: Tensor, advantages: Tensor, sampled: Tensor) -> Terms:
        lengths = sampled.sum(-1, keepdim=True).clamp(min=1)
        # log_ratio is 0 outside `sampled`, so the sum is over the sampled tokens
        mean = log_ratio.detach().sum(-1, keepdim=True) / lengths
        return self.clipped((mean + (log_ratio - log_ratio.detach())).exp(), advantages)


class Gmpo(Gspo):
    """The geometric mean of the sequence's token ratios, each clipped before the mean (GMPO, Zhao
    et al. 2025, arXiv 2507.20673).

    `f = A prod_t c_t^(1/length)`, `c_t = min(r_t, 1 + eps_high)` where A > 0, else `max(r_t, 1 -
    eps_low)`, over every sampled token, kept or rejected. The paper's range (e^-0.4, e^0.4) is
    eps_low=0.3297, eps_high=0.4918. A clipped token has no gradient and counts in the mean. The
    token form is Gspo's. Biased by the clip (`clip_*_share`), and by design by the geometric mean,
    like Gspo.
    """

    def __call__(self, log_ratio: Tensor, advantages: Tensor, sampled: Tensor) -> Terms:
        low = log(self.low) if self.low > 0 else -inf
        clipped = torch.where(
            advantages > 0, log_ratio.clamp(max=log(self.high)), log_ratio.clamp(min=low)
        )
        lengths = sampled.sum(-1, keepdim=True).clamp(min=1)
        mean = clipped.detach().sum(-1, keepdim=True) / lengths
        objective = advantages * (mean + (clipped - clipped.detach())).exp()
        detached = log_ratio.detach()
        return objective, {
            "clip_low_share": (detached < low) & (advantages < 0),
            "clip_high_share": (detached > log(self.high)) & (advantages > 0),
        }


class Sapo(PolicyLoss):
    """`f = A (1 + 2/tau tanh(tau (r - 1)/2))`: a soft gate instead of a clip (SAPO, Gao et al.
    2025, arXiv 2511.20347).

    It is the paper's `A 4/tau sigmoid(tau (r - 1))` less a constant, for a readable value. At r = 1
    the objective and its gradient equal r A's. tau is `sapo_tau_pos` where A > 0, else
    `sapo_tau_neg`.

    Biased by the gate: a token of ratio r counts `1 - tanh(tau (r - 1)/2)^2` of itself.
    """

    token_wise = True
    biases = (Bias("gate", {"sapo_tau_pos": 1e-6, "sapo_tau_neg": 1e-6}),)
    own_settings = ("sapo_tau_pos", "sapo_tau_neg")

    def __init__(self, spec: ObjectiveSpec) -> None:
        self.tau_pos, self.tau_neg = spec.sapo_tau_pos, spec.sapo_tau_neg

    def __call__(self, log_ratio: Tensor, advantages: Tensor, sampled: Tensor) -> Terms:
        tau = torch.where(advantages > 0, log_ratio.new_tensor(self.tau_pos), self.tau_neg)
        gate = 2.0 / tau * torch.tanh(tau * torch.expm1(log_ratio) / 2.0)
        return advantages * (1.0 + gate), {}


class Cispo(PolicyLoss):
    """`SG(clip(r, low, high)) A log p_new` (MiniMax-M1): clipped tokens keep their gradient.

    Biased by the clip of the weight alone: a token of ratio r above `high` counts high/r of itself,
    one below `low` low/r.
    """

    clips = True
    token_wise = True
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

    It adds no bias: what remains is what the weights leave uncorrected.
    """

    carries_ratio = False
    token_wise = True

    def __call__(self, log_ratio: Tensor, advantages: Tensor, sampled: Tensor) -> Terms:
        # its value is 1 and its gradient that of log p_new, since the anchor is SG(p_new)
        return log_ratio.exp() * advantages, {}
