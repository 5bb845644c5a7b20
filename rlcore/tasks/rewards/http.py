"""A grader behind HTTP in the form of OpenRLHF's remote reward models: a service written for it is
asked unchanged.

    {"query": [...], "prompts": [...], "labels": [...]}
    {"rewards": [...], "scores": [...], "extra_logs": {name: [...]}}
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import aiohttp

from rlcore.tasks.rewards.protocols import Asked, Unjudged, Verdict, finite
from rlcore.tasks.rewards.requests import RequestReward
from rlcore.tasks.rewards.specs import HttpSpec

NAME = re.compile(r"[A-Za-z0-9_.@-]{1,40}")  # of an extra log
MAX_LOGS = 32


class HttpReward(RequestReward[HttpSpec]):
    """`query` is a prompt with its response behind it, `prompts` the problem's question, `labels`
    its reference answer."""

    async def ask(
        self, session: aiohttp.ClientSession, batch: Sequence[Asked]
    ) -> list[float | Unjudged | Verdict]:
        payload = {
            "query": [asked.question + asked.response for asked in batch],
            "prompts": [asked.question for asked in batch],
            "labels": [asked.reference for asked in batch],
        }
        return await self._endpoint.post(session, payload, lambda data: read(data, len(batch)))


def read(data: Any, count: int) -> list[float | Unjudged | Verdict]:
    """The verdicts of a reply on `count` samples. Raises ValueError for another form; a reward that
    is no finite number fails its sample alone."""
    if not isinstance(data, dict) or not isinstance(data.get("rewards"), list):
        raise ValueError('is not an object with a list "rewards"')
    logs = _logs(data, count)
    return [
        _one(value, i, logs) for i, value in enumerate(_column(data["rewards"], "rewards", count))
    ]


def _one(value: Any, index: int, logs: dict[str, list[Any]]) -> Unjudged | Verdict:
    if isinstance(value, list) and len(value) == 1:  # a tensor [N, 1]
        value = value[0]
    try:
        reward = finite(value, "the reward in the reply")
    except Unjudged as e:
        return e
    numbers = {name: column[index] for name, column in logs.items() if _is_finite(column[index])}
    return Verdict("ok", reward, {name: float(number) for name, number in numbers.items()})


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _logs(data: dict[str, Any], count: int) -> dict[str, list[Any]]:
    """`scores` and `extra_logs` by name, a value a sample; a single number stands for all of
    them. They are shown and nothing else, so names that no metric can have are left out, and so are
    values that are no finite numbers."""
    extra = data.get("extra_logs") or {}
    if not isinstance(extra, dict):
        raise ValueError('has "extra_logs" that are not an object')
    named = {str(name): column for name, column in extra.items() if NAME.fullmatch(str(name))}
    if data.get("scores") is not None:
        named["score"] = data["scores"]
    logs = {}
    for name, column in list(named.items())[-MAX_LOGS:]:
        if isinstance(column, list):
            logs[name] = _column(column, name, count)
        elif isinstance(column, int | float):
            logs[name] = [column] * count
    return logs


def _column(values: list[Any], name: str, count: int) -> list[Any]:
    if len(values) != count:
        raise ValueError(f'has {len(values)} "{name}" for {count} samples')
    return values
