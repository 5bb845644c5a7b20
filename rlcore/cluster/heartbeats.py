"""Heartbeats of everything but the rollout actors: the buffer, the learner ranks, the graders,
Ray's head."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from rlcore.cluster.calls import call
from rlcore.cluster.clients import RayBuffer, RayLearner, RayScorer
from rlcore.cluster.clients.scorer import RayNodeScorers
from rlcore.cluster.clients.shards import RayShards
from rlcore.cluster.ray_cluster import head_answers
from rlcore.errors import DeadlineExceeded, RoleLost
from rlcore.loop.role_protocols import RoleWatch
from rlcore.loop.specs import SupervisionSpec

if TYPE_CHECKING:
    from rlcore.cluster.teacher_engines import RayTeacher

HEAD_MISSES = 2  # unanswered heartbeats in a row after which Ray's head counts as lost
RESTARTS = 2  # restarts of the graders' process in a row


class RayRoleWatch(RoleWatch):
    """Raises RoleLost for a role that the run needs, and notices restarts of the graders'
    process."""

    def __init__(
        self,
        buffer: RayBuffer,
        learner: RayLearner,
        scorer: RayScorer,
        supervision: SupervisionSpec,
        note: Callable[[str], None],
        shards: RayShards,
        beside: RayNodeScorers,
        teacher: RayTeacher | None = None,
    ) -> None:
        """`scorer`: the graders on the driver's node; `beside`: the graders on actors' nodes.
        `teacher`: its engines, where it has some."""
        self._roles = [(buffer.handle, "the replay buffer"), *learner.roles()]
        self._scorer = scorer
        self._spec = supervision
        self._note = note
        self._shards = shards
        self._beside = beside
        self._teacher = teacher

    async def run(
        self,
        scorer_restarted: Callable[[], Awaitable[None]],
        shard_lost: Callable[[str], Awaitable[None]],
    ) -> None:
        misses, scorer = 0, await self._scorer_pid()
        while True:
            await asyncio.sleep(self._spec.heartbeat_s)
            misses = 0 if await head_answers() else misses + 1
            if misses >= HEAD_MISSES:
                raise RoleLost("Ray's head process cannot be reached any more")
            await asyncio.gather(*(self._alive(handle, who) for handle, who in self._roles))
            if misses:
                continue  # what follows asks the head for its nodes, and would wait for it
            if self._teacher is not None:
                self._teacher.watch()
            for shard in await self._shards.watch(self._note):
                await shard_lost(shard)
            now = await self._scorer_pid()
            if now != scorer or await self._beside.watch():
                scorer = now
                await scorer_restarted()
            for sentence in await self._scorer_notes():
                self._note(sentence)

    async def _scorer_notes(self) -> list[str]:
        try:
            return await self._scorer.notes()
        except DeadlineExceeded:
            return []  # the next heartbeat judges a process that does not answer

    async def _alive(self, handle: Any, who: str) -> None:
        limit, key = self._spec.hang_timeout_s, "cluster.hang_timeout_s"
        what = f"a heartbeat of {who}"
        try:
            asked = handle.alive.remote()
            await call(asked, timeout_s=limit, what=what, key=key, who=who, note=self._note)
        except DeadlineExceeded as e:
            raise RoleLost(f"{who} did not answer for {key}={limit:g} s") from e

    async def _scorer_pid(self) -> int:
        """The graders' process; one that does not answer is killed, and Ray starts another."""
        limit = self._spec.hang_timeout_s
        for _ in range(RESTARTS):
            try:
                return await self._scorer.pid(self._note)
            except DeadlineExceeded:
                self._note(
                    "the graders' process did not answer for cluster.hang_timeout_s="
                    f"{limit:g} s: it is restarted"
                )
                self._scorer.restart()
        raise RoleLost("the graders' process did not restart")
