"""Simulated answers as the rules see them, without text, log-probs or bytes: a forecast of hundreds
of thousands of answers has no time to serialise any."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from rlcore.buffer.gathering import Told
from rlcore.planner.actor import Runs
from rlcore.references import RecordReference
from rlcore.serialization import RecordHeader
from rlcore.testing.fakes import FakeScorer
from rlcore.types import Request, Score

Answered = tuple[RecordHeader, RecordReference]


class Answers:
    """The answers that the buffer has references to, by key."""

    def __init__(self) -> None:
        self._runs: dict[int, Runs] = {}
        self._next = 0

    def put(self, request: Request, runs: Runs, actor: str, draw_id: str, shard: str) -> Answered:
        """A finished answer. `runs`: what sampled its simulated tokens. `shard`: of its node."""
        key = self._next
        self._next += 1
        self._runs[key] = runs
        tokens = sum(count for _, count in runs)
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
            tokens=tokens,
            length=tokens + 1,
            oldest_version=runs[0][0],
            newest_version=runs[-1][0],
        )
        return header, RecordReference(shard, key, tokens)

    def runs(self, reference: Any) -> Runs:
        """Of an answer that the buffer has."""
        return self._runs[reference.key]

    def drop(self, keys: Sequence[int]) -> None:
        """The buffer has released these."""
        for key in keys:
            self._runs.pop(key, None)


class Graders:
    """Those of one node: a queue of answers. The buffer hears of an answer and of its score when it
    was graded, in messages that pause as a shard's do."""

    def __init__(self, grade_s: float) -> None:
        self.grade_s = grade_s
        self._queue: deque[tuple[float, Answered]] = deque()  # and when each is graded
        self._free_at = 0.0
        self._news = asyncio.Event()

    def put(self, answered: Answered) -> None:
        """An answer of this node."""
        begun = max(self._free_at, asyncio.get_running_loop().time())
        self._free_at = begun + self.grade_s
        self._queue.append((self._free_at, answered))
        self._news.set()

    async def graded(self, not_before: float) -> Told:
        """What was graded since the last call; waits for some, and until then."""
        clock = asyncio.get_running_loop().time
        while not self._queue:
            self._news.clear()
            await self._news.wait()
        await asyncio.sleep(max(self._queue[0][0], not_before) - clock())
        told = Told()
        while self._queue and (self._queue[0][0] <= clock() or not told.kept):
            _, (header, reference) = self._queue.popleft()
            reward = float(header.sample_index % 2)  # half of the answers are right
            told.kept.append((header, reference))
            told.scores.append(
                Score(
                    header.group_id,
                    header.sample_index,
                    header.draw_id,
                    "ok",
                    reward,
                    {"correct": reward},
                )
            )
        return told


class PlannedScorer(FakeScorer):
    """Graders of training answers on every node."""

    answers: Answers

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._graders: dict[str, Graders] = {}  # by the shard of their node

    def finished(self, answered: Answered) -> None:
        """From a rollout actor."""
        shard = answered[1].shard
        if shard not in self._graders:
            self._graders[shard] = Graders(self.grade_s)
            self._grading.append(asyncio.create_task(self._tell(shard, self._graders[shard])))
        self._graders[shard].put(answered)

    async def _tell(self, shard: str, graders: Graders) -> None:
        clock, not_before = asyncio.get_running_loop().time, 0.0
        while True:
            told = await graders.graded(not_before)
            heard = await self._buffer.actor.add_told(shard, told)
            self.answers.drop(heard.released)
            not_before = clock() + heard.pause_s

    async def samples(self, step: int, count: int) -> list[dict[str, Any]]:
        """None can be shown."""
        return []
