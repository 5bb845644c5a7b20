"""Nodes of a simulated cluster: actors whose records stay in the shard of their node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlcore.buffer.shard import Shard
from rlcore.cluster.actors.buffer import BufferActor
from rlcore.references import ShardLost


class FakeNodes:
    """Node 0 is the driver's, where the buffer is; the others have a shard each, until it dies.

    `lost`: shards that died and were not reported yet.
    """

    def __init__(self, count: int, buffer: BufferActor) -> None:
        self.shards = {i: Shard(f"shard-{i}") for i in range(1, count)}
        self.lost: list[str] = []
        self._count = count
        self._buffer = buffer

    def of(self, actor: str) -> int:
        """The node of an actor, by its number."""
        return int(actor.rpartition("-")[2]) % self._count

    async def add_records(self, actor: str, records: Sequence[bytes]) -> None:
        """From a rollout actor."""
        shard = self.shards.get(self.of(actor))
        if shard is None:
            await self._buffer.add_records(records)
            return
        kept = shard.put(records)
        shard.drop(await self._buffer.add_references(shard.name, kept))

    def fetch(self, keys: Mapping[str, Sequence[int]]) -> dict[str, list[bytes]]:
        """As `rlcore.references.Fetch`."""
        found = {shard.name: shard for shard in self.shards.values()}
        for name in keys:
            if name not in found:
                raise ShardLost(f"{name} is lost")
        return {name: found[name].get(its) for name, its in keys.items()}

    async def beat(self) -> None:
        """A heartbeat of every shard: it drops what was released."""
        for shard in list(self.shards.values()):
            shard.drop(await self._buffer.released(shard.name))

    def die(self, node: int) -> None:
        """The node's records are gone; its actors are another matter."""
        self.lost.append(self.shards.pop(node).name)
