"""What a grader may return, and the text conventions that graders share."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from rlcore.types import Grade


def as_grade(value: Any, *, by_turn: bool = False) -> Grade:
    """A `Grade` from a Grade, a number or (number, parts). Raises ValueError for anything else, NaN
    and infinities, and for rewards of turns unless `by_turn`."""
    turns: tuple[float, ...] = ()
    if isinstance(value, Grade):
        reward, parts, turns = value.reward, value.parts, value.turn_rewards
    elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        reward, parts = value
    else:
        reward, parts = value, {}
    if turns and not by_turn:
        raise ValueError("the grader rewards turns, which only an environment's grade may do")
    return Grade(
        _finite(reward, "reward"),
        {str(name): _finite(part, f"part {name}") for name, part in parts.items()},
        tuple(_finite(turn, "turn's reward") for turn in turns),
    )


def _finite(value: Any, what: str) -> float:
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"the grader's {what} is {value!r:.80}, not a finite number")
    return float(value)


def weighted(correct: bool, well_formed: bool, format_reward: float, **parts: float) -> Grade:
    """(1 - format_reward) for a correct answer plus format_reward for a well-formed one; `parts`
    are reported with it."""
    reward = (1.0 - format_reward) * correct + format_reward * well_formed
    return Grade(reward, {"correct": float(correct), "format": float(well_formed), **parts})


def tagged_answer(response: str) -> str | None:
    """Text inside the last <answer>...</answer>, None without one."""
    head, close, _ = response.rpartition("</answer>")
    _, opened, answer = head.rpartition("<answer>")
    return answer.strip() if close and opened else None
