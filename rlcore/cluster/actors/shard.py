"""The process that keeps the records of one node."""

from __future__ import annotations

import asyncio
from typing import Any

from rlcore.buffer.shard import Kept, Shard


class ShardActor:
    """Takes the records of this node's rollout actors, tells the buffer of them, and gives them to
    learner ranks. Drops what the buffer has released when it hears from it."""

    def __init__(self, name: str, buffer: Any) -> None:
        self._shard = Shard(name)
        self._buffer = buffer
        self._told: Kept = []  # what the buffer is to know next
        self._telling = asyncio.Lock()

    async def add_records(self, records: list[bytes]) -> None:
        """Serialised training trajectories. What comes while the buffer is being called goes
        together into the next call."""
        self._told += self._shard.put(records)
        async with self._telling:
            told, self._told = self._told, []
            if told:  # else another caller has sent it
                name = self._shard.name
                self._shard.drop(await self._buffer.add_references.remote(name, told))

    async def fetch(self, keys: list[int]) -> list[bytes]:
        """Records by key. Raises ShardLost for one that was dropped."""
        return self._shard.get(keys)

    async def alive(self) -> int:
        """A heartbeat; bytes that are kept."""
        self._shard.drop(await self._buffer.released.remote(self._shard.name))
        return self._shard.bytes
