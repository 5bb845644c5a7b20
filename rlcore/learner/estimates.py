"""How much the estimate of a masked-diffusion policy's log-probs depends on which tokens of a
prompt it hides: two draws of it on a sample of a step's sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlcore.interfaces import Reduce
from rlcore.learner.sequences import Reader, ScoredSequence
from rlcore.models.masking import Estimate
from rlcore.types import Group

SEQUENCES = 4  # of a rank: two short passes a step


def read_twice(
    groups: Sequence[Group], read: Reader, share: float
) -> tuple[list[ScoredSequence], list[ScoredSequence]]:
    """The first response of some groups as its record has it, and with the tokens of its prompt
    hidden anew, each with probability `share`."""
    records = [t for group in groups for episode in group.episodes[:1] for t in episode.parts]
    chosen = [t for t in records if len(t.logp_inf)][:SEQUENCES]
    anew = [replace(t, extras=Estimate.of_record(t).again(share).extras()) for t in chosen]
    return [read(t, 1.0) for t in chosen], [read(t, 1.0) for t in anew]


def variance(pairs: Sequence[tuple[Tensor, Tensor]], reduce: Reduce) -> dict[str, float]:
    """Metrics of pairs of log-probs [S] of the same tokens under two draws.

    Half the squared difference of two draws estimates their variance without bias. Collective.
    """
    tokens = torch.zeros(4, dtype=torch.float64)
    for one, two in pairs:
        gap = (one - two).double().cpu()
        tokens += torch.stack([gap.square().sum() / 2, gap.sum().square() / 2, *_counts(gap)])
    of_tokens, of_sequences, n, sequences = reduce(tokens).tolist()
    return {
        "estimate/token_variance": of_tokens / max(n, 1.0),
        "estimate/sequence_variance": of_sequences / max(sequences, 1.0),
    }


def _counts(gap: Tensor) -> list[Tensor]:
    return [torch.tensor(float(n), dtype=torch.float64) for n in (len(gap), 1)]
