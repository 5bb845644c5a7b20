"""The heartbeats of a simulated run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rlcore.errors import RoleLost
from rlcore.loop.clients import RoleWatch
from rlcore.testing.fakes import FakeBuffer, FakeScorer


class FakeWatch(RoleWatch):
    """Notices within a heartbeat that the graders were restarted, and what a test says is lost."""

    def __init__(self, buffer: FakeBuffer, scorer: FakeScorer, *, heartbeat_s: float) -> None:
        self.lost = ""  # a role that the run cannot do without
        self._buffer = buffer
        self._scorer = scorer
        self._heartbeat_s = heartbeat_s

    async def run(
        self,
        scorer_restarted: Callable[[], Awaitable[None]],
        shard_lost: Callable[[str], Awaitable[None]],
    ) -> None:
        restarts = 0
        while True:
            await asyncio.sleep(self._heartbeat_s)
            await self._buffer.actor.alive()
            if self.lost:
                raise RoleLost(f"{self.lost} died")
            await self._buffer.nodes.beat()
            while self._buffer.nodes.lost:
                await shard_lost(self._buffer.nodes.lost.pop(0))
            if self._scorer.restarts != restarts:
                restarts = self._scorer.restarts
                await scorer_restarted()
