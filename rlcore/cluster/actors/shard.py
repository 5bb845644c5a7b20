"""The process that keeps the records of one node."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from rlcore.buffer.gathering import Gathering, Heard, Told
from rlcore.buffer.record_files import RecordFile, file_of, read_records, write_records
from rlcore.buffer.shard import Shard
from rlcore.references import ShardLost
from rlcore.types import Score


class ShardActor:
    """Takes the records of this node's rollout actors and the scores of its graders, tells the
    buffer of them, and gives the records to learner ranks. Drops what the buffer has released when
    it hears from it."""

    def __init__(self, name: str, buffer: Any) -> None:
        self._shard = Shard(name)
        self._buffer = buffer
        self._gathering = Gathering(self._shard, self._tell)

    async def _tell(self, name: str, told: Told) -> Heard:
        heard: Heard = await self._buffer.add_told.remote(name, told)
        return heard

    async def add_records(self, records: list[bytes]) -> None:
        """Serialised training trajectories; an answer when the buffer knows of them."""
        self._gathering.put_records(records)
        await self._gathering.told()

    async def add_scores(self, scores: list[Score]) -> None:
        """Scores of training episodes; an answer when the buffer knows of them."""
        self._gathering.put_scores(scores)
        await self._gathering.told()

    async def fetch(self, shard: str, keys: list[int]) -> list[bytes]:
        """Records by key. Raises ShardLost for one that was dropped, or that another process kept
        under this one's name."""
        return self._kept(shard, keys)

    async def write(self, shard: str, keys: list[int], folder: str) -> str:
        """Write records to a checkpoint's folder, in a thread; their checksum. Raises as `fetch`
        does, and OSError."""
        records, path = self._kept(shard, keys), Path(folder) / file_of(shard)
        return await asyncio.to_thread(write_records, path, records)

    async def read(self, shard: str, files: list[RecordFile], folder: str) -> list[int]:
        """Keep the records of files of a checkpoint, read in a thread; the key of the first record
        of each. Raises ShardLost as `fetch` does, and JournalError, keeping nothing."""
        self._check(shard)
        read = await asyncio.to_thread(lambda: [read_records(Path(folder), f) for f in files])
        return [self._shard.keep(records) for records in read]

    def _kept(self, shard: str, keys: list[int]) -> list[bytes]:
        self._check(shard)
        return self._shard.get(keys)

    def _check(self, shard: str) -> None:
        if shard != self._shard.name:
            raise ShardLost(f"{shard} is lost: {self._shard.name} has taken its place")

    async def pid(self) -> int:
        """This process."""
        return os.getpid()

    async def alive(self) -> int:
        """A heartbeat; bytes that are kept."""
        self._shard.drop(await self._buffer.released.remote(self._shard.name))
        return self._shard.bytes
