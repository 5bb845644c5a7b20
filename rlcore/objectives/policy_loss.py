"""The policy loss per token: summed with the coefficients of `aggregate`, a step's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.objectives.precision import CLAMP, at_least_float32
from rlcore.objectives.protocols import LossTensors, PolicyLoss


def policy_loss(
    loss: PolicyLoss, tokens: LossTensors, *, short_circuit: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """`-SG(weight) * objective` [B, T], and indicators [B, T] by name; 0 where the mask is 0.

    With `short_circuit` the ratio is `p_new/SG(p_new)`: its value is 1, so no clip ever binds
    (TIS-adjusted and Jackpot B.1). The mean of an indicator over the global mask is the metric of
    that name: the loss's own, and `ratio`.
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
    advantages = torch.where(on, at_least_float32(tokens.advantages.detach()), 0.0)
    objective, indicators = loss(log_ratio, advantages, counted)
    weight = torch.where(on, at_least_float32(tokens.weight.detach()), 0.0)
    indicators["ratio"] = log_ratio.detach().exp()
    return -weight * objective, {
        name: torch.where(on, value, 0.0).to(weight.dtype) for name, value in indicators.items()
    }
