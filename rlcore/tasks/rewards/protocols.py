"""The protocols of a reward: its question and its answer."""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlcore.types import ScoreStatus

MAX_ERROR = 300  # characters


@dataclass(frozen=True, slots=True)
class RewardQuery:
    """One sample to judge. Example: RewardQuery("7302=", "0237", "0237")"""

    question: str  # before any chat template
    reference: str  # the problem's answer; may be ""
    response: str  # the model's text


@dataclass(frozen=True, slots=True)
class RewardVerdict:
    """The verdict of one reward on one sample. Example: RewardVerdict("ok", 0.5, {"score": 1.0})"""

    status: ScoreStatus
    value: float | None = None  # None unless status == "ok"
    parts: dict[str, float] = field(default_factory=dict)
    error: str = ""  # one line
    seconds: float = 0.0
    token_rewards: tuple[float, ...] = ()  # of the task's own grader; `value` is their sum
    answer: str = ""  # of the task's own grader: as that of `rlcore.types.Grade`


Tell = Callable[[RewardVerdict], None]


class Reward(ABC):
    """One reward of a task. Every sample that is submitted gets one verdict, unless the reward is
    closed.

    A shipped one is built as Class(key, settings, thread of requests, note), a user's own as
    Class(**own.args).
    """

    @abstractmethod
    def submit(self, asked: RewardQuery, tell: Tell) -> None:
        """Queue a sample; returns at once. `tell` is called from a thread of the reward."""

    @abstractmethod
    def check(self) -> None:
        """Raise StageError if the reward has failed for good."""

    @abstractmethod
    def close(self) -> None:
        """Stop at once; samples that were not judged are dropped."""


class Unjudged(Exception):
    """A sample, or all samples of a request, could not be judged; the message is one line."""

    def __init__(self, message: str, status: ScoreStatus = "error") -> None:
        super().__init__(" ".join(message.split())[:MAX_ERROR])
        self.status: ScoreStatus = status


def finite(value: Any, what: str) -> float:
    """`value` as a float. Raises Unjudged for anything but a finite number."""
    try:
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:  # an integer that no float holds
        number = math.inf
    if not math.isfinite(number):
        raise Unjudged(f"{what} is {_shown(value)}, not a finite number")
    return number


def _shown(value: Any) -> str:
    """The beginning of a value's text; a deep or long value may have none."""
    try:
        return f"{value!r:.80}"
    except Exception as error:  # of any kind: a class of another's may raise what it likes
        return f"a {type(value).__name__} ({type(error).__name__})"
