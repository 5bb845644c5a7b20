"""What became of the groups of each task: for metrics, and to notice a task that gives nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlcore.buffer.selection import FILTERED_EQUAL
from rlcore.errors import UserError


@dataclass(slots=True)
class TaskAccount:
    """Groups of one task since the start of the run."""

    consumed: int = 0
    filtered: int = 0  # by dynamic sampling
    dropped: int = 0  # failed, or evicted for another reason
    filtered_in_a_row: int = 0
    last_reward: float = 0.0  # that the samples of the newest filtered group agreed on


class TaskAccounts:
    """The accounts of all tasks, by the first part of their prompt ids."""

    def __init__(self) -> None:
        self.tasks: dict[str, TaskAccount] = {}

    def of(self, task: str) -> TaskAccount:
        """The account of a task."""
        return self.tasks.setdefault(task, TaskAccount())

    def departed(self, task: str, reason: str | None) -> None:
        """Count a group that left: trained on (None), or for a reason."""
        account = self.of(task)
        account.consumed += reason is None
        account.filtered += reason == FILTERED_EQUAL
        account.dropped += reason not in (None, FILTERED_EQUAL)

    def judged(self, task: str, *, filtered: bool, reward: float) -> None:
        """Note whether a complete group was filtered. `reward`: of one of its samples."""
        account = self.of(task)
        account.filtered_in_a_row = account.filtered_in_a_row + 1 if filtered else 0
        if filtered:
            account.last_reward = reward

    def check(self, limit: int) -> None:
        """Raise UserError for a task of which the last `limit` groups were all filtered."""
        for task, account in self.tasks.items():
            if account.filtered_in_a_row >= limit:
                raise UserError(
                    f"algorithm.dynamic_sampling=true has filtered the last "
                    f"{account.filtered_in_a_row} groups of task {task}, since all samples of each "
                    f"had equal rewards (the newest: {account.last_reward:g}), so that nothing of "
                    "it is trained on: make its problems easier or harder, sample more of each "
                    f"prompt, leave the task out, or raise algorithm.filter_limit={limit}."
                )

    def metrics(self) -> dict[str, float]:
        """`task/<task>/<count>` of every task that has had a group."""
        return {
            f"task/{task}/{name}": float(getattr(account, name))
            for task, account in sorted(self.tasks.items())
            for name in ("consumed", "filtered", "dropped")
        }

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {task: asdict(account) for task, account in self.tasks.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self.tasks = {task: TaskAccount(**fields) for task, fields in state.items()}
