"""Keep a list of names sorted while every turn adds some (after the environment of that name that
verifiers and torchtitan ship)."""

from __future__ import annotations

from rlcore.environments.protocol import Action, Environment, Opening, Reply
from rlcore.errors import UserError
from rlcore.interfaces import Task
from rlcore.tasks.alphabet_sort import AlphabetSort as Names
from rlcore.types import Grade, Item


class AlphabetSort(Environment):
    """Plays the task `alphabet_sort`. Every turn is rewarded: by the likeness of its list with the
    right one, to the power `power`, divided by the number of turns. So the best reward is 1. Part
    `correct`: all lists were right.
    """

    def __init__(self, task: Task, *, power: float = 4.0) -> None:
        if not isinstance(task, Names):
            raise UserError(
                "environment.name=alphabet_sort plays no other task's problems: set "
                "task=alphabet_sort."
            )
        if power <= 0:
            raise ValueError("power must be above 0")
        self._task = task
        self._power = power

    def reset(self, item: Item, seed: int) -> Opening:
        self._lists = item.meta["lists"]
        self._names: list[str] = list(self._lists[0])
        self._turn = 0
        self._right = 0
        return Opening([{"role": "user", "content": item.question}])

    def step(self, action: Action) -> Reply:
        likeness = self._task.likeness(action.text, self._names)
        self._right += likeness == 1.0
        self._turn += 1
        reward = likeness**self._power / self._task.turns
        if self._turn == self._task.turns:
            return Reply(over=True, reward=reward)
        names = self._lists[self._turn]
        self._names += names
        message = {"role": "user", "content": self._task.asked(names, self._turn)}
        return Reply([message], reward=reward)

    def grade(self) -> Grade:
        lists = float(self._right)
        return Grade(0.0, {"correct": float(lists == self._task.turns), "right_lists": lists})

    def worked(self) -> str | None:
        return self._task.written(self._names)
