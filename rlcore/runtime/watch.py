"""Heartbeats of everything but the rollout actors: the buffer, the learner's ranks, the graders, Ray's head."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray

from rlcore.errors import DeadlineExceeded
from rlcore.runtime.cluster import RoleLost, call, head_answers

HEAD_MISSES = 2  # unanswered looks in a row after which Ray's head counts as lost


class RoleWatch:
    """Raises RoleLost for what the run cannot do without, and sees the graders' process restarted."""

    def __init__(
        self,
        roles: Sequence[tuple[Any, str]],
        scorer: Any,
        *,
        heartbeat_s: float,
        hang_timeout_s: float,
        note: Callable[[str], None],
        restarted: Callable[[], Awaitable[None]],
    ) -> None:
        """`roles`: handles with `alive()`, and their names. `restarted` is awaited when the graders' process is new."""
        self._roles, self._scorer, self._heartbeat_s, self._limit = roles, scorer, heartbeat_s, hang_timeout_s
        self._note, self._restarted = note, restarted

    async def run(self) -> None:
        """Look after all of them for ever."""
        misses, scorer = 0, await self._scorer_pid()
        while True:
            await asyncio.sleep(self._heartbeat_s)
            misses = 0 if await head_answers() else misses + 1
            if misses >= HEAD_MISSES:
                raise RoleLost("Ray's head process cannot be reached any more")
            await asyncio.gather(*(self._alive(handle, who) for handle, who in self._roles))
            now = await self._scorer_pid()
            if now != scorer:
                scorer = now
                await self._restarted()

    async def _alive(self, handle: Any, who: str) -> None:
        try:
            await self._call(handle.alive.remote(), who)
        except DeadlineExceeded as e:
            raise RoleLost(f"{who} did not answer for cluster.hang_timeout_s={self._limit:g} s") from e

    async def _scorer_pid(self) -> int:
        """The graders' process; one that does not answer is killed, whereupon Ray starts another."""
        who = "the graders' process"
        for _ in range(2):
            try:
                return int(await self._call(self._scorer.pid.remote(), who))
            except DeadlineExceeded:
                self._note(f"{who} did not answer for cluster.hang_timeout_s={self._limit:g} s: started anew")
                ray.kill(self._scorer, no_restart=False)
        raise RoleLost(f"{who} did not come back")

    async def _call(self, ref: Any, who: str) -> Any:
        what = f"a heartbeat of {who}"
        return await call(ref, timeout_s=self._limit, what=what, key="cluster.hang_timeout_s", who=who)
