"""Which of a group's oversampled responses are trained on, where that takes the learner's own
log-probs: those that its dense policy would most likely have accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlcore.corrections.formulas.groups import best_of_group
from rlcore.corrections.formulas.numerics import total
from rlcore.corrections.formulas.obrs import obrs_acceptance
from rlcore.interfaces import Reduce
from rlcore.learner.batch import Scored, StepBatch
from rlcore.types import Group


def dense_acceptance(logp_ref: Tensor, logp_inf: Tensor, mask: Tensor) -> Tensor:
    """Mean of `min(1, p_ref/p_inf)` over each response's tokens, [B]: the share of them that
    rejection sampling towards the learner's policy would accept (DistillSparse, figure 4).

    Log-probs and mask [B, T]. A token without a usable log-prob counts as rejected, a response
    without tokens as accepted.
    """
    accepted = torch.where(mask, obrs_acceptance(logp_ref, logp_inf), 0.0).sum(-1)
    count = mask.sum(-1)
    return torch.where(count > 0, accepted / count.clamp(min=1), 1.0)


def keep_accepted(
    groups: Sequence[Group], batch: StepBatch, ref: Scored, keep: int
) -> tuple[list[Group], Tensor]:
    """The groups with the `keep` responses of highest dense acceptance each, and which rows of
    `batch` [B] bool those are.

    `batch` was built of `groups`, `ref` are its scores. Ties go to the earlier sample. The kept
    responses do not follow the actor's policy any more, and nothing corrects for that: advantages
    are normalised over them, and the gradient is biased towards what the learner finds likely.
    """
    acceptance = dense_acceptance(ref.logp, batch.sent.logp_inf, batch.sent.mask)
    kept = best_of_group(acceptance, batch.sent.group_ids, keep=keep)
    rows = iter(kept.tolist())
    return [replace(g, episodes=[e for e in g.episodes if next(rows)]) for g in groups], kept


def selection_metrics(
    batch: StepBatch, ref: Scored, kept: Tensor, reduce: Reduce
) -> dict[str, float]:
    """Means over the responses of all ranks, before the selection and after it."""
    acceptance = dense_acceptance(ref.logp, batch.sent.logp_inf, batch.sent.mask)
    rewards = batch.sent.rewards
    everything = torch.ones_like(kept)
    values = [acceptance, acceptance.where(kept, 0.0), rewards.where(kept, 0.0), kept, everything]
    before, after, reward, count, all_count = total(values, reduce)
    return {
        "train/acceptance_mean": before / max(all_count, 1.0),
        "train/acceptance_kept_mean": after / max(count, 1.0),
        "train/reward_kept_mean": reward / max(count, 1.0),
    }
