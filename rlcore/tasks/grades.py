"""The return values that a grader may give, and the text conventions that graders share."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlcore.interfaces import Task
from rlcore.types import Grade, Item

MOST_ANSWER = 400  # characters of a vote


def as_grade(value: Any, *, by_turn: bool = False) -> Grade:
    """A `Grade` from a Grade, a number, a list with a reward for every token, or either with parts
    as (it, parts). Raises ValueError for anything else, NaN and infinities, and for rewards of
    turns unless `by_turn`."""
    turns: tuple[float, ...] = ()
    tokens: Sequence[float] = ()
    answer = value.answer if isinstance(value, Grade) else ""
    if isinstance(value, Grade):
        reward, parts = value.reward, value.parts
        turns, tokens = value.turn_rewards, value.token_rewards
    elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        reward, parts = value
    else:
        reward, parts = value, {}
    if isinstance(reward, list):
        if not reward:
            raise ValueError("the grader's list of rewards is empty")
        reward, tokens = 0.0, reward
    if turns and not by_turn:
        raise ValueError("the grader rewards turns, which only an environment's grade may do")
    return Grade(
        _finite(reward, "reward"),
        {str(name): _finite(part, f"part {name}") for name, part in parts.items()},
        tuple(_finite(turn, "turn's reward") for turn in turns),
        tuple(_finite(token, "token's reward") for token in tokens),
        str(answer)[:MOST_ANSWER],
    )


def wants_tokens(grade: Callable[..., Any]) -> bool:
    """Return whether a grader asks for the text of every token."""
    return "tokens" in inspect.signature(grade).parameters


def grade_text(task: Task, item: Item, text: str) -> Grade:
    """A task's grade of one answer within an episode. Raises ValueError where it rewards tokens,
    since the answer's tokens are not the episode's."""
    grade = as_grade(task.grade(item, text))
    if grade.token_rewards:
        raise ValueError(
            "the task's grader rewards every token of an answer, and an environment's episode is "
            "rewarded whole or by turn: use environment=none"
        )
    return grade


def dense(grade: Grade, tokens: int) -> tuple[float, tuple[float, ...]]:
    """(reward, rewards of tokens) of a response of so many tokens; the grade's own reward is the
    last token's. Raises ValueError where another number of tokens is rewarded."""
    given = grade.token_rewards
    if not given:
        return grade.reward, ()
    if len(given) != tokens:
        raise ValueError(f"the grader rewards {len(given)} tokens, and the response has {tokens}")
    rewards = (*given[:-1], given[-1] + grade.reward)
    return math.fsum(rewards), rewards


def _finite(value: Any, what: str) -> float:
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"the grader's {what} is {value!r:.80}, not a finite number")
    return float(value)


def weighted(
    correct: bool, well_formed: bool, format_reward: float, *, answer: str = "", **parts: float
) -> Grade:
    """(1 - format_reward) for a correct answer plus format_reward for a well-formed one; `parts`
    are reported with it. `answer`: see `Grade`."""
    reward = (1.0 - format_reward) * correct + format_reward * well_formed
    found = {"correct": float(correct), "format": float(well_formed), **parts}
    return Grade(reward, found, answer=answer)
