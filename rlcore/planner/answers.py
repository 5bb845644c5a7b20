"""Simulated answers as the rules see them, without text, log-probs or bytes: a forecast of hundreds
of thousands of answers has no time to serialise any."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rlcore.buffer.gathering import Told
from rlcore.references import RecordReference
from rlcore.serialization import RecordHeader
from rlcore.testing.fakes import FakeScorer
from rlcore.types import Request, Score

SHARD = "simulated"  # that the references of answers name
Runs = tuple[tuple[int, int], ...]  # (version, tokens that it sampled one after the other)


class Answers:
    """The answers that the buffer has references to, by key."""

    def __init__(self) -> None:
        self._runs: dict[int, Runs] = {}
        self._next = 0

    def put(
        self, request: Request, versions: Sequence[int], actor: str, draw_id: str
    ) -> tuple[RecordHeader, RecordReference]:
        """A finished answer, with the version of every simulated token."""
        runs = tuple((version, len(list(of))) for version, of in groupby(versions))
        key = self._next
        self._next += 1
        self._runs[key] = runs
        header = RecordHeader(
            request.group_id,
            request.sample_index,
            request.prompt_id,
            draw_id,
            part=0,
            parts=1,
            purpose=request.purpose,
            actor_id=actor,
            actor_kind="bf16",
            finish_reason="stop",
            tokens=len(versions),
            length=len(versions) + 1,
            oldest_version=versions[0],
            newest_version=versions[-1],
        )
        return header, RecordReference(SHARD, key, len(versions))

    def runs(self, reference: Any) -> Runs:
        """Of an answer that the buffer has."""
        return self._runs[reference.key]

    def drop(self, keys: Sequence[int]) -> None:
        """The buffer has released these."""
        for key in keys:
            self._runs.pop(key, None)


class PlannedScorer(FakeScorer):
    """One queue of training answers. The buffer hears of an answer and of its score when it was
    graded."""

    answers: Answers

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._finished: asyncio.Queue[tuple[RecordHeader, RecordReference]] = asyncio.Queue()
        self._grading.append(asyncio.create_task(self._grade_all()))

    def finished(self, answer: tuple[RecordHeader, RecordReference]) -> None:
        """From a rollout actor."""
        self._finished.put_nowait(answer)

    async def _grade_all(self) -> None:
        while True:
            header, reference = await self._finished.get()
            await asyncio.sleep(self.grade_s)
            reward = float(header.sample_index % 2)  # half of the answers are right
            score = Score(
                header.group_id,
                header.sample_index,
                header.draw_id,
                "ok",
                reward,
                {"correct": reward},
            )
            told = Told([(header, reference)], [score])
            heard = await self._buffer.actor.add_told(SHARD, told)
            self.answers.drop(heard.released)

    async def samples(self, step: int, count: int) -> list[dict[str, Any]]:
        """None can be shown."""
        return []
