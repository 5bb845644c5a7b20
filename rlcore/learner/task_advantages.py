"""The advantages of a step's tokens, where tasks may have their own advantage."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlcore.interfaces import Reduce
from rlcore.learner.batch import StepBatch, TurnSpans
from rlcore.learner.specs import LearnerJob
from rlcore.objectives.advantages import (
    Rewards,
    over_tokens,
    rewards_to_go,
    sequence_advantages,
    turn_advantages,
)
from rlcore.objectives.protocols import Advantage
from rlcore.objectives.specs import make_advantage


class TaskAdvantages:
    """The advantage of each training task.

    Where there are several, statistics over a batch (`reinforce`, `reinforce_pp`) are over the
    task's own episodes of the global batch. Rewards of two tasks have neither a mean nor a scale in
    common, and a mean over both would reward every answer to the easier one. Statistics over a
    group are the same either way.
    """

    def __init__(self, job: LearnerJob) -> None:
        self._usual = make_advantage(job.objective)
        self._by_task = {
            task: make_advantage(job.objective.model_copy(update={"advantage": name}))
            for task, name in job.task_advantages.items()
        }
        self._share = job.objective.turn_share
        self._discount = job.objective.turn_discount
        self._by_token = job.objective.credit == "token"

    def over_tokens(
        self, batch: StepBatch, reduce: Reduce, penalty: Tensor | None = None
    ) -> Tensor:
        """[B, T] float32: `(1 - turn_share) A(episode) + turn_share A(turn)`, 0 where there is no
        token. With a `penalty` [B, T] float64, which is subtracted from the rewards to go,
        A(episode) alone (`Advantage.of_tokens`)."""
        sent, mask = batch.sent, batch.sent.mask
        if penalty is not None:

            def of(advantage: Advantage, rows: Tensor) -> Tensor:
                lengths = mask[rows].sum(dim=1)
                rewards = Rewards(sent.rewards[rows], sent.group_ids[rows], reduce, lengths)
                return advantage.of_tokens(rewards, penalty[rows], mask[rows]).float()

            return self._by_rows(batch, torch.zeros_like(sent.advantages), of)
        values = over_tokens(self(batch, reduce), mask)
        if not self._share:
            return values
        turns = self.of_turns(batch, reduce).gather(1, self._turns(batch).of_token) * mask
        return (1 - self._share) * values + self._share * turns

    def __call__(self, batch: StepBatch, reduce: Reduce) -> Tensor:
        """[B] float32: the advantage of each episode. Raises ValueError for an episode of a task
        that the job does not name."""
        sent, lengths = batch.sent, batch.sent.mask.sum(dim=1)

        def of(advantage: Advantage, rows: Tensor) -> Tensor:
            rewards, ids = sent.rewards[rows], sent.group_ids[rows]
            return sequence_advantages(advantage, rewards, ids, reduce, lengths[rows])

        none = torch.zeros_like(sent.rewards, dtype=torch.float32)
        return self._by_rows(batch, none, of)

    def of_turns(self, batch: StepBatch, reduce: Reduce) -> Tensor:
        """[B, K] float32: the advantage of each turn, or of each token instead of a turn, from
        its reward to go."""
        turns, mask = self._turns(batch), batch.sent.mask
        to_go = rewards_to_go(turns.rewards, self._discount)
        numbers = torch.arange(to_go.shape[1], device=to_go.device)
        present = numbers < turns.count[:, None]
        tokens = to_go.new_zeros(to_go.shape).scatter_add(1, turns.of_token, mask.to(to_go))

        def of(advantage: Advantage, rows: Tensor) -> Tensor:
            return turn_advantages(
                advantage,
                to_go[rows],
                batch.sent.group_ids[rows],
                tokens[rows],
                reduce,
                present[rows],
            )

        return self._by_rows(batch, torch.zeros(to_go.shape, device=to_go.device), of)

    def _turns(self, batch: StepBatch) -> TurnSpans:
        """Return the turns that a reward to go is computed over: `credit`."""
        if not self._by_token:
            return batch.turns
        rewards, mask = batch.turns.token_rewards, batch.sent.mask
        columns = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
        return TurnSpans(rewards, mask.sum(dim=1), torch.where(mask, columns, 0), rewards)

    def metrics(self, batch: StepBatch, reduce: Reduce) -> dict[str, float]:
        """Metrics of turns, where advantages are computed by turn."""
        if not self._share:
            return {}
        turns, ids = self._turns(batch), batch.sent.group_ids
        numbers = torch.arange(turns.rewards.shape[1], device=ids.device)
        present = numbers < turns.count[:, None]
        rows = torch.stack(torch.broadcast_tensors(ids[:, None], numbers), -1)[present]
        _, reached = torch.unique(rows, dim=0, return_counts=True)
        alone = torch.tensor([int((reached == 1).sum()), len(rows)], dtype=torch.float64)
        found, every = reduce(alone).tolist()
        return {"train/single_turn_share": found / max(every, 1.0)}

    def _by_rows(
        self, batch: StepBatch, values: Tensor, of: Callable[[Advantage, Tensor], Tensor]
    ) -> Tensor:
        """`values`, filled for each task with what `of` makes of its episodes' rows [B] bool."""
        if not self._by_task:
            return of(self._usual, values.new_ones(len(values), dtype=torch.bool))
        unknown = set(batch.tasks) - set(self._by_task)
        if unknown:
            raise ValueError(f"episodes of {sorted(unknown)}, which is not a task of this learner")
        # Every rank goes through all tasks: statistics of the global batch are collective calls.
        for task, advantage in self._by_task.items():
            rows = torch.tensor([t == task for t in batch.tasks], dtype=torch.bool)
            rows = rows.to(values.device)
            values[rows] = of(advantage, rows)
        return values
