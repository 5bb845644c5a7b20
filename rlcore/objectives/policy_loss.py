"""Per-token policy losses. Summed with the coefficients of `aggregate`, they are the loss of the step.

Every loss is `-SG(weight) * objective`, [B,T] float32, 0 where the mask is 0 (whatever stands there). `logp_new` [B,T]
carries the gradient; the rest is detached. With `short_circuit` the ratio is `p_new/SG(p_new)`: its value is 1, so no
clip ever binds (TIS-adjusted and Jackpot B.1, RAPID). Beside the loss each returns per-token indicators [B,T] whose
mean over the global mask is the metric of that name.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlcore.errors import UserError

Loss = Literal["ppo", "gspo", "cispo", "reinforce"]
CLAMP = 20.0  # of log ratios before exp
LossTerms = tuple[Tensor, dict[str, Tensor]]


def policy_loss(
    kind: Loss,
    logp_new: Tensor,
    logp_ref: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weight: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    short_circuit: bool = False,
) -> LossTerms:
    """Loss per token [B,T] and indicators, by name. `mask` is the one after rejection. Raises UserError on the name."""
    on = mask != 0
    anchor = logp_new.detach() if short_circuit or kind == "reinforce" else logp_ref.detach()
    log_ratio = torch.where(on, logp_new.float() - anchor.float(), 0.0).clamp(-CLAMP, CLAMP)
    advantages = torch.where(on, advantages.detach().float(), 0.0)
    low, high = 1.0 - eps_low, 1.0 + eps_high
    if kind == "ppo":
        objective, metrics = _ppo(log_ratio.exp(), advantages, low, high)
    elif kind == "gspo":
        objective, metrics = _ppo(_sequence_ratio(log_ratio, on), advantages, low, high)
    elif kind == "cispo":
        objective, metrics = _cispo(log_ratio, advantages, low, high)
    elif kind == "reinforce":
        objective, metrics = log_ratio.exp() * advantages, {}
    else:
        raise UserError.choice("algorithm.loss", kind, ("ppo", "gspo", "cispo", "reinforce"))
    loss = -torch.where(on, weight.detach().float(), 0.0) * objective
    metrics["ratio"] = torch.where(on, log_ratio.detach().exp(), 0.0)
    return loss, {name: (value & on).float() if value.dtype == torch.bool else value for name, value in metrics.items()}


def _sequence_ratio(log_ratio: Tensor, on: Tensor) -> Tensor:
    """GSPO's geometric mean of the sequence's token ratios, repeated over its tokens (Zheng et al. 2025, eq. 7).

    In the paper's token form, `SG(s) p_new/SG(p_new)`: each token carries its own gradient, so that a weight per token
    weighs that token; with equal weights the gradient is that of s itself.
    """
    lengths = on.sum(-1, keepdim=True).clamp(min=1)
    mean = log_ratio.detach().sum(-1, keepdim=True) / lengths
    return (mean + (log_ratio - log_ratio.detach())).exp()


def _ppo(ratio: Tensor, advantages: Tensor, low: float, high: float) -> LossTerms:
    """`min(r A, clip(r, low, high) A)`; DAPO's clip-higher is `high - 1 > 1 - low`. GSPO: r of the sequence."""
    objective = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    detached = ratio.detach()
    clipped_low = (detached < low) & (advantages < 0)
    clipped_high = (detached > high) & (advantages > 0)
    return objective, {"clip_low_share": clipped_low, "clip_high_share": clipped_high}


def _cispo(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> LossTerms:
    """`SG(clip(r, low, high)) A log p_new` (MiniMax-M1): clipped tokens keep their gradient.

    Written with `1 + (log r - SG(log r))` for `log p_new`: the same gradient, and a value that says something.
    """
    ratio = log_ratio.detach().exp()
    objective = ratio.clamp(low, high) * advantages * (1.0 + (log_ratio - log_ratio.detach()))
    return objective, {"clip_low_share": ratio < low, "clip_high_share": ratio > high}
