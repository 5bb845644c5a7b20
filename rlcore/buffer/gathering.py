"""What a node's shard tells the buffer: the headers and scores of its samples, in few messages.

A message costs the buffer far more than a sample in it. One is sent at a time, and after each the
buffer says how long to pause, so that all shards together do not send more than it can take: on a
few nodes for milliseconds, on 512 for half a second. Nothing waits longer than that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rlcore.buffer.shard import Kept, Shard
from rlcore.pickling import ByFields
from rlcore.types import Score

PAUSE_S = 1e-3  # between two messages, of any shards


@dataclass(frozen=True, slots=True)
class Told(ByFields):
    """What the buffer is to know of a shard's samples."""

    kept: Kept = field(default_factory=list)  # records that have come
    scores: list[Score] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Heard(ByFields):
    """The buffer's answer."""

    released: list[int]  # keys of records that nobody will read any more
    pause_s: float  # before the next message


class Gathering:
    """Gathers what one shard has to tell."""

    def __init__(self, shard: Shard, tell: Callable[[str, Told], Awaitable[Heard]]) -> None:
        """`tell`: calls the buffer, with the name of the shard."""
        self._shard = shard
        self._tell = tell
        self._next = Told()
        self._not_before = 0.0  # the next message, by the loop's clock
        self._telling = asyncio.Lock()

    def put_records(self, records: Sequence[bytes]) -> None:
        """Serialised training trajectories of this node. Raises ValueError, keeping none, if one
        is malformed."""
        self._next.kept.extend(self._shard.put(records))

    def put_scores(self, scores: Sequence[Score]) -> None:
        """Scores of training samples, from the graders of this node."""
        self._next.scores.extend(scores)

    @property
    def waiting(self) -> bool:
        """Whether the buffer does not know all of it yet."""
        return bool(self._next.kept or self._next.scores)

    async def told(self) -> None:
        """Return when the buffer has been told all that was put before."""
        clock = asyncio.get_running_loop().time
        async with self._telling:
            if not self.waiting:
                return  # another caller has sent it
            if (pause := self._not_before - clock()) > 0:
                await asyncio.sleep(pause)
            message, self._next = self._next, Told()
            heard = await self._tell(self._shard.name, message)
            self._not_before = clock() + heard.pause_s
            self._shard.drop(heard.released)
