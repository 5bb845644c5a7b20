"""From per-token losses to one number: coefficients that do not depend on micro-batches or ranks.

`loss = sum(coefficients * per_token_loss)` over all ranks and micro-batches. The counts are of the
whole step over all ranks, so any split of the sequences into micro-batches adds up to the same
loss. The mask is the one after rejection, so a token mean divides by the kept tokens (see
`rlcore.corrections.jackpot` for why that is right).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.interfaces import Reduce
from rlcore.objectives.specs import Aggregation


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
