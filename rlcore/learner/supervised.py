"""Supervised steps: cross-entropy on worked answers, through the same engine and head pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlcore.interfaces import Reduce
from rlcore.learner.head_spec import HeadSpec
from rlcore.learner.packing import EpisodeTokens, MicroBatch
from rlcore.learner.protocols import TrainEngine
from rlcore.learner.sums import LOSS, Sums

# Plain cross-entropy is the log-likelihood of the untempered model.
TEMPERATURE = 1.0


def cross_entropy(
    engine: TrainEngine,
    examples: Sequence[EpisodeTokens],
    micro: Sequence[MicroBatch],
    reduce: Reduce,
    head: HeadSpec,
) -> Sums:
    """All backward passes of a step: the mean over the scored tokens of all ranks.

    `micro`: this rank's `examples`, filled up to the count of the other ranks with dummies. `head`:
    how the policy's head is computed; the temperature is 1.
    """
    sums = Sums.of_step({"loss/sft": LOSS}, examples, engine.device)
    tokens = sum(s.scored for parts in examples for s in parts)
    count = max(float(reduce(torch.tensor(float(tokens)))), 1.0)
    spec = HeadSpec(TEMPERATURE, head.chunk, fp32=head.fp32)
    for i, mb in enumerate(micro):
        scores = engine.forward(mb, None, spec)
        # a dummy adds nothing, but its backward joins the other ranks' collectives
        loss = -scores.logp.sum() / count * (1.0 if len(mb.episodes) else 0.0)
        engine.backward(loss, last=i == len(micro) - 1)
        if len(mb.episodes):
            nonfinite = (~torch.isfinite(scores.logp)).sum()
            entropy = scores.entropy.sum()
            sums.add({"loss/sft": loss, "entropy": entropy, "nonfinite_logp": nonfinite})
    return sums
