"""Whether a model computes the same where several ranks hold parts of its sequences: asked of the
model's own architecture, by running it in both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlcore.errors import UserError
from rlcore.learner.packing import pack
from rlcore.learner.policy import Policy
from rlcore.learner.shards import Shards
from rlcore.learner.sharing import TOLERANCE, odd_attention, probe, short_model

SplitAttention = Callable[[Any, Shards], None]
KEY = "learner.sequence_parallel"


def hold_in_parts(lm: Any, shards: Shards, split: SplitAttention, device: torch.device) -> None:
    """Prepare a model, already as it will attend, for parts of sequences, in place. Collective.

    Raises UserError for one that cannot be split: everything that reads other positions than its
    own outside of attention shows in a pass over a few tokens of a random model of its kind.
    """
    reason = odd_attention(lm)
    if reason is None:
        plain = short_model(lm).to(device)
        split(lm, shards)
        difference = _difference(plain, short_model(lm).to(device), shards)
        if difference > TOLERANCE[lm.dtype]:
            reason = f"its hidden states would differ by {difference:.2g}"
    if reason is not None:
        raise UserError.choice(KEY, shards.count, ("1",), f"of this model, {reason}")


@torch.no_grad()
def _difference(plain: Any, parts: Any, shards: Shards) -> float:
    """Largest difference of a probe's hidden states, as a share of the largest of them."""
    whole, own = Policy(plain), Policy(parts, shards=shards)
    (rows,) = pack(probe(whole), 1000, "sorted", device=whole.head.weight.device)
    expected = whole.hidden(rows)
    mine = shards.tokens(shards.padded(rows))
    found = shards.joined(own.hidden(rows), mine, len(rows.targets))
    return float((found - expected).abs().max() / expected.abs().max())
