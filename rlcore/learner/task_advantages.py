"""Advantages of a step: of all episodes together, or of several tasks each by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.interfaces import Reduce
from rlcore.learner.batch import StepBatch
from rlcore.learner.specs import LearnerJob
from rlcore.objectives.registry import make_advantage
from rlcore.objectives.rewards import sequence_advantages


class TaskAdvantages:
    """The advantage of each training task.

    Where there are several, statistics over a batch (`reinforce`, `reinforce_pp`) are over the
    task's own episodes of the global batch: rewards of two tasks have neither a mean nor a scale in
    common, and a mean over both would reward every answer to the easier one. Statistics over a
    group are the same either way.
    """

    def __init__(self, job: LearnerJob) -> None:
        self._usual = make_advantage(job.objective)
        self._by_task = {
            task: make_advantage(job.objective.model_copy(update={"advantage": name}))
            for task, name in job.task_advantages.items()
        }

    def __call__(self, batch: StepBatch, reduce: Reduce) -> Tensor:
        """[B] float32: the advantage of each episode. Raises ValueError for an episode of a task
        that the job does not name."""
        sent, lengths = batch.sent, batch.sent.mask.sum(dim=1)
        if not self._by_task:
            rewards, ids = sent.rewards, sent.group_ids
            return sequence_advantages(self._usual, rewards, ids, reduce, lengths)
        unknown = set(batch.tasks) - set(self._by_task)
        if unknown:
            raise ValueError(f"episodes of {sorted(unknown)}, which is no task of this learner")
        values = torch.zeros_like(sent.rewards)
        # Every rank goes through all tasks: statistics of the global batch are collective calls.
        for task, advantage in self._by_task.items():
            rows = torch.tensor([t == task for t in batch.tasks], dtype=torch.bool)
            rows = rows.to(values.device)
            values[rows] = sequence_advantages(
                advantage, sent.rewards[rows], sent.group_ids[rows], reduce, lengths[rows]
            )
        return values
