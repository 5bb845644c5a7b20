"""Dynamic vocabulary pruning: log-probs of the policy constrained to its safe set (DVP section
5)."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from rlcore.corrections.formulas.arguments import require
from rlcore.corrections.specs import DvpSpec

# stands for a pruned logit: exp() of it is 0, and unlike -inf it is safe in a backward pass
FILL = -1e30
OUTSIDE_LOGP = -1e6  # stands for the log-prob of a pruned token: its ratio is 0 for every purpose


def safe_set_logprobs(
    logits: Tensor, ids: Tensor, *, rho: float = DvpSpec().rho
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of `ids` under `p(a | a in S)`, with `S = {a : p(a) >= rho max_b p(b)}` (DVP def.
    5.1 and 5.2).

    Args: logits [..., V] of any float dtype, after temperature; ids [...] int; rho in (0, 1].
    Returns (logp [...] float32, inside [...] bool, coverage [...] float32 = sum of p over S,
    detached). logp carries a gradient to the logits, exactly 0 outside S; S itself is taken without
    one. An id outside S has the constant log-prob -1e6 and no gradient at all: its ratio is 0.
    """
    require(
        0.0 < rho <= 1.0,
        f"rho={rho} is not accepted: the safe set keeps p >= rho * max p, with rho in (0, 1].",
    )
    require(
        ids.shape == logits.shape[:-1],
        f"ids has shape {list(ids.shape)}, and logits {list(logits.shape)}: one id a position.",
    )
    wide = logits if logits.dtype == torch.float64 else logits.float()
    with torch.no_grad():
        top = wide.amax(-1, keepdim=True)
        safe = wide >= top + log(rho)
        inside = safe.gather(-1, ids.long()[..., None])[..., 0]
    # subtracted first, because large logits would lose the low-order digits of log-probs
    wide = wide - top
    masked = torch.where(safe, wide, FILL)
    normaliser = masked.logsumexp(-1)
    logp = masked.gather(-1, ids.long()[..., None])[..., 0] - normaliser
    coverage = (normaliser - wide.logsumexp(-1)).detach().exp().clamp(max=1.0)
    return torch.where(inside, logp, OUTSIDE_LOGP), inside, coverage
