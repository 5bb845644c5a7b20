"""The replay buffer's client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlcore.cluster.calls import call, get, kill
from rlcore.cluster.specs import Hosting
from rlcore.loop.role_protocols import Batch, BufferClient, Missing


class RayBuffer(BufferClient):
    """Every call under the deadline `schedule.publish_timeout_s`."""

    def __init__(self, handle: Any, name: str, started: Any, hosting: Hosting) -> None:
        """`name`: under which other processes find the actor. `started`: its answer to `start`."""
        self.handle = handle
        self.name = name
        self.starting = [(started, "the replay buffer to start")]
        self._timeout_s = hosting.schedule.publish_timeout_s
        self._start_timeout_s = hosting.supervision.start_timeout_s

    async def _call(self, ref: Any, what: str) -> Any:
        return await call(
            ref,
            timeout_s=self._timeout_s,
            what=what,
            key="schedule.publish_timeout_s",
            who="the replay buffer",
        )

    async def wait_room(self, timeout_s: float, *, all_done: bool, total: int) -> int:
        ref = self.handle.wait_room.remote(timeout_s, all_done, total)
        return int(await self._call(ref, "places in the buffer"))

    async def admit(self, prompt_ids: Sequence[str]) -> list[int]:
        return list(await self._call(self.handle.admit.remote(list(prompt_ids)), "an admission"))

    async def in_flight(self, group_ids: Sequence[int] | None = None) -> Missing:
        ref = self.handle.in_flight.remote(None if group_ids is None else list(group_ids))
        return dict(await self._call(ref, "the groups in flight"))

    async def landed(self) -> list[int]:
        return list(await self._call(self.handle.landed.remote(), "the groups that are complete"))

    async def lost(self, group_ids: Sequence[int], limit: int) -> tuple[Missing, dict[int, str]]:
        ref = self.handle.lost.remote(list(group_ids), limit)
        again, given_up = await self._call(ref, "recording lost groups")
        return again, given_up

    async def shard_lost(self, shard: str) -> Missing:
        return dict(await self._call(self.handle.shard_lost.remote(shard), "the loss of a shard"))

    async def outcomes(self) -> list[tuple[str, float]]:
        return list(await self._call(self.handle.outcomes.remote(), "the pass rates of groups"))

    async def failed_scores(self) -> tuple[int, int, str]:
        ref = self.handle.failed_scores.remote()
        count, alike, sentence = await self._call(ref, "the number of failed scores")
        return count, alike, sentence

    async def set_versions(self, published: int, learner: int) -> None:
        ref = self.handle.set_versions.remote(published, learner)
        await self._call(ref, "setting the buffer's versions")

    async def limit_staleness(self, bound: int) -> None:
        ref = self.handle.limit_staleness.remote(bound)
        await self._call(ref, "setting the admitted staleness")

    async def wait_sampled(self, timeout_s: float, total: int) -> bool:
        ref = self.handle.wait_sampled.remote(timeout_s, total)
        return bool(await self._call(ref, "the samples of a version"))

    async def wait_ready(self, step: int, timeout_s: float, wave: int | None) -> bool:
        ref = self.handle.wait_ready.remote(step, timeout_s, wave)
        return bool(await self._call(ref, "a training batch"))

    async def take(self, step: int) -> Batch:
        groups, metrics = await self._call(self.handle.take.remote(step), "a training batch")
        return Batch(groups, metrics)

    async def commit(self, step: int) -> None:
        await self._call(self.handle.commit.remote(step), "a commit")

    async def give_up(self, reason: str) -> int:
        return int(await self._call(self.handle.give_up.remote(reason), "giving up all samples"))

    async def waiting_for(self, step: int) -> str:
        return str(await self._call(self.handle.waiting_for.remote(step), "the buffer's state"))

    async def metrics(self) -> dict[str, float]:
        return dict(await self._call(self.handle.metrics.remote(), "the buffer's counts"))

    async def snapshot(self) -> None:
        await self._call(self.handle.snapshot.remote(), "a snapshot of the buffer")

    async def save(self, folder: str, *, timeout_s: float) -> None:
        ref, what = self.handle.save.remote(folder, timeout_s), "writing the buffer journal"
        key = "checkpoint.write_timeout_s"
        await call(ref, timeout_s=timeout_s, what=what, key=key, who="the replay buffer")

    def load(self, folder: str, shards: Sequence[str]) -> None:
        """Continue from what `save` wrote; these shards read the shards' files. Blocks: before the
        loop runs."""
        limit = self._start_timeout_s
        get(
            self.handle.load.remote(folder, list(shards), limit),
            timeout_s=limit,
            what="loading the buffer journal",
            key="cluster.start_timeout_s",
        )

    def kill(self) -> None:
        """End the process at once."""
        kill(self.handle)
