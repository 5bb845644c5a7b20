"""Nodes of a simulated cluster: actors whose records stay in the shard of their node."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlcore.buffer.gathering import Gathering, Heard, Told
from rlcore.buffer.record_files import RecordFile, file_of, read_records, write_records
from rlcore.buffer.shard import Shard
from rlcore.cluster.actors.buffer import BufferActor
from rlcore.references import ShardLost
from rlcore.types import Score


class FakeNodes:
    """Node 0 is the driver's, where the buffer is; the others have a shard each, until it dies.

    `lost`: shards that died and were not reported yet.
    """

    def __init__(self, count: int, buffer: BufferActor) -> None:
        self.shards = {i: Shard(f"shard-{i}") for i in range(1, count)}
        self._gatherings = {i: Gathering(s, self._tell) for i, s in self.shards.items()}
        self._telling: dict[int, asyncio.Task[None]] = {}  # by node
        self.lost: list[str] = []
        self._count = count
        self._buffer = buffer

    def of(self, actor: str) -> int:
        """The node of an actor, by its number."""
        return int(actor.rpartition("-")[2]) % self._count

    async def add_records(self, actor: str, records: Sequence[bytes]) -> None:
        """From a rollout actor."""
        gathering = self._gatherings.get(self.of(actor))
        if gathering is None:
            await self._buffer.add_records(records)
            return
        gathering.put_records(records)
        self._send(self.of(actor))

    async def add_scores(self, node: int, scores: Sequence[Score]) -> None:
        """From the graders of a node."""
        gathering = self._gatherings.get(node)
        if gathering is None:
            await self._buffer.add_scores(scores)
            return
        gathering.put_scores(scores)
        self._send(node)

    def _send(self, node: int) -> None:
        """Senders do not wait for the buffer."""
        if node not in self._telling:
            task = self._telling[node] = asyncio.create_task(self._gatherings[node].told())
            task.add_done_callback(lambda task: self._sent(node, task))

    def _sent(self, node: int, task: asyncio.Task[None]) -> None:
        del self._telling[node]
        if not task.cancelled():
            task.exception()  # the buffer's own next heartbeat raises it
        if node in self._gatherings and self._gatherings[node].waiting:
            self._send(node)

    async def _tell(self, name: str, told: Told) -> Heard:
        return await self._buffer.add_told(name, told)

    def fetch(self, keys: Mapping[str, Sequence[int]]) -> dict[str, list[bytes]]:
        """As `rlcore.references.Fetch`."""
        found = {shard.name: shard for shard in self.shards.values()}
        for name in keys:
            if name not in found:
                raise ShardLost(f"{name} is lost")
        return {name: found[name].get(its) for name, its in keys.items()}

    def write(self, folder: Path, keys: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """As `rlcore.buffer.record_files.WriteShards`."""
        found = self.fetch(keys)
        return {name: write_records(folder / file_of(name), found[name]) for name in keys}

    def read(self, folder: Path, files: Mapping[str, Sequence[RecordFile]]) -> dict[str, list[int]]:
        """As `rlcore.buffer.record_files.ReadShards`."""
        found = {shard.name: shard for shard in self.shards.values()}
        return {
            name: [found[name].keep(read_records(folder, file)) for file in its]
            for name, its in files.items()
        }

    async def beat(self) -> None:
        """A heartbeat of every shard: it drops what was released."""
        for shard in list(self.shards.values()):
            shard.drop(await self._buffer.released(shard.name))

    def revive(self, node: int) -> None:
        """A new process takes the place of a shard that died alone."""
        shard = self.shards[node] = Shard(f"shard-{node}#2")
        self._gatherings[node] = Gathering(shard, self._tell)

    def die(self, node: int) -> None:
        """The node's records are gone; its actors are another matter: until `revive` they send to
        the buffer."""
        self.lost.append(self.shards.pop(node).name)
        del self._gatherings[node]
        if node in self._telling:
            self._telling[node].cancel()
