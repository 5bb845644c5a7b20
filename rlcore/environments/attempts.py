"""A task's problems as environments: one attempt, or several with an answer to each wrong one."""

from __future__ import annotations

from dataclasses import replace

from rlcore.environments.protocol import Action, Environment, Opening, Reply
from rlcore.interfaces import Task
from rlcore.tasks.code import CodeTask
from rlcore.tasks.grades import grade_text
from rlcore.types import Grade, Item


class OneTurn(Environment):
    """Any task as an environment of one turn: the first turn is the response."""

    asks_task = True

    def __init__(self, task: Task) -> None:
        self._task = task

    def reset(self, item: Item, seed: int) -> Opening:
        self._item = item
        self._response = ""
        return Opening(item.opening())

    def step(self, action: Action) -> Reply:
        self._response = action.whole or action.text  # as a task without turns is given it
        return Reply(over=True)

    def grade(self) -> Grade:
        return self._task.grade(self._item, self._response)

    def worked(self) -> str | None:
        return self._task.worked_answer(self._item)


SOLVED = 1.0


class Attempts(Environment):
    """Any task, whose grader judges every attempt; the last one is the episode's.

    A program (tasks `mbpp`, `leetcode`) is answered by the test that it fails, or the end of its
    output; other answers by `retry` alone. `cost`: what each attempt before the last takes off the
    reward, as that turn's own reward.
    """

    asks_task = True

    def __init__(
        self,
        task: Task,
        *,
        attempts: int = 3,
        retry: str = "That is not correct. Try again.",
        cost: float = 0.0,
    ) -> None:
        if attempts < 1:
            raise ValueError("attempts must be at least 1")
        if not isinstance(retry, str) or not isinstance(cost, int | float):
            raise ValueError(f"retry must be a text and cost a number, not {retry!r} and {cost!r}")
        self._task = task
        self._attempts = attempts
        self._retry = retry
        self._cost = cost

    def reset(self, item: Item, seed: int) -> Opening:
        self._item = item
        self._count = 0
        self._verdict: Grade | None = None
        return Opening(item.opening())

    def step(self, action: Action) -> Reply:
        self._count += 1
        self._verdict, why = self._judged(action.whole or action.text)
        solved = self._verdict.parts.get("correct", self._verdict.reward) >= SOLVED
        if solved or self._count >= self._attempts:
            return Reply(over=True)
        told = f"{why}\n{self._retry}" if why else self._retry
        reward = -self._cost if self._cost else None
        return Reply([{"role": "user", "content": told}], reward=reward)

    def _judged(self, text: str) -> tuple[Grade, str]:
        """The task's verdict, and what is wrong where the task can say it."""
        if isinstance(self._task, CodeTask):
            return self._task.attempt(self._item, text)
        return grade_text(self._task, self._item, text), ""

    def grade(self) -> Grade:
        verdict = self._verdict
        if verdict is None:  # a limit ended the episode before the first attempt was read
            verdict = grade_text(self._task, self._item, "")
        return replace(verdict, parts={**verdict.parts, "attempts": float(self._count)})

    def worked(self) -> str | None:
        return self._task.worked_answer(self._item)

    def close(self) -> None:
        """End the sandbox of programs."""
        if isinstance(self._task, CodeTask):
            self._task.close()
