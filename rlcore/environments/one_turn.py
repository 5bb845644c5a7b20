"""An existing task as an environment: one question, one answer, the task's own grader."""

from __future__ import annotations

from rlcore.environments.protocol import Action, Environment, Opening, Reply
from rlcore.interfaces import Task
from rlcore.types import Grade, Item


class OneTurn(Environment):
    """Any task, without a line of code: the first turn is the response."""

    asks_task = True

    def __init__(self, task: Task) -> None:
        self._task = task

    def reset(self, item: Item, seed: int) -> Opening:
        self._item = item
        self._response = ""
        return Opening(item.opening())

    def step(self, action: Action) -> Reply:
        self._response = action.text
        return Reply(over=True)

    def grade(self) -> Grade:
        return self._task.grade(self._item, self._response)

    def worked(self) -> str | None:
        return self._task.worked_answer(self._item)
