"""A shard of the buffer: the records of one node, to which the buffer has references, and the
reports about them that it sends to the buffer. Single-threaded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rlcore.pickling import ByFields
from rlcore.references import Fetch, RecordReference, ShardLost, read_records
from rlcore.serialization import RecordHeader, StoredEpisode, StoredGroup, read_headers
from rlcore.types import Score

Kept = list[tuple[RecordHeader, RecordReference]]


class Shard:
    """Records by key."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bytes = 0
        self._records: dict[int, bytes] = {}
        self._next = 0

    def put(self, records: Sequence[bytes]) -> Kept:
        """Keep records whose headers can be read; returns headers and references."""
        read = read_headers(records)
        first = self.keep([record for _, record in read])
        return [
            (header, RecordReference(self.name, key, len(record)))
            for key, (header, record) in enumerate(read, first)
        ]

    def keep(self, records: Sequence[bytes]) -> int:
        """Keep records that the buffer has admitted already. Returns the key of the first; the keys
        of the others follow it."""
        first = self._next
        self._records.update(enumerate(records, first))
        self._next += len(records)
        self.bytes += sum(map(len, records))
        return first

    def get(self, keys: Sequence[int]) -> list[bytes]:
        """Records by key. Raises ShardLost for one that was dropped."""
        try:
            return [self._records[key] for key in keys]
        except KeyError as e:
            raise ShardLost(f"{self.name} has no record {e}") from e

    def drop(self, keys: Iterable[int]) -> None:
        """Drop records that no process will read again."""
        for key in keys:
            record = self._records.pop(key, None)
            if record is not None:
                self.bytes -= len(record)


def with_records(groups: Sequence[StoredGroup], fetch: Fetch) -> list[StoredGroup]:
    """Groups with all records, in one request to each shard. Raises ShardLost."""
    records = [r for g in groups for e in g.episodes for r in e.records]
    read = iter(read_records(records, fetch))

    def whole(episode: StoredEpisode) -> StoredEpisode:
        return StoredEpisode(episode.score, tuple(next(read) for _ in episode.records))

    return [
        StoredGroup(
            g.group_id,
            g.prompt_id,
            g.admitted_version,
            g.arrival_version,
            tuple(whole(e) for e in g.episodes),
        )
        for g in groups
    ]


PAUSE_S = 1e-3  # between two messages, of any shards


# What a node's shard reports to the buffer: the headers and scores of its samples, in few messages.
#
# A message costs the buffer far more than a sample in it. One message is sent at a time, and the
# buffer's reply says how long to pause, so that all shards together do not send more than it can
# take: milliseconds on a few nodes, half a second on 512. No report waits longer than that.


@dataclass(slots=True)
class ShardReport(ByFields):
    """A shard's report to the buffer about its samples."""

    kept: Kept = field(default_factory=list)  # records that have come
    scores: list[Score] = field(default_factory=list)
    unreadable: int = 0  # records without a readable header


@dataclass(frozen=True, slots=True)
class ShardReply(ByFields):
    """The buffer's answer to a report."""

    released: list[int]  # keys of records that no process will read again
    pause_s: float  # before the next message


class ShardReporter:
    """Collects the reports of one shard and sends them to the buffer."""

    def __init__(
        self, shard: Shard, send: Callable[[str, ShardReport], Awaitable[ShardReply]]
    ) -> None:
        """`send`: sends a report to the buffer, with the name of the shard."""
        self._shard = shard
        self._send = send
        self._next = ShardReport()
        self._not_before = 0.0  # the next message, by the loop's clock
        self._sending = asyncio.Lock()

    def put_records(self, records: Sequence[bytes]) -> None:
        """Serialised training trajectories of this node."""
        kept = self._shard.put(records)
        self._next.kept.extend(kept)
        self._next.unreadable += len(records) - len(kept)

    def put_scores(self, scores: Sequence[Score]) -> None:
        """Scores of training samples, from the graders of this node."""
        self._next.scores.extend(scores)

    @property
    def waiting(self) -> bool:
        """True if a part of the report has not been sent yet."""
        return bool(self._next.kept or self._next.scores or self._next.unreadable)

    async def flush(self) -> None:
        """Return when the buffer has received everything that was put before."""
        clock = asyncio.get_running_loop().time
        async with self._sending:
            if not self.waiting:
                return  # another caller has sent it
            if (pause := self._not_before - clock()) > 0:
                await asyncio.sleep(pause)
            message, self._next = self._next, ShardReport()
            reply = await self._send(self._shard.name, message)
            self._not_before = clock() + reply.pause_s
            self._shard.drop(reply.released)
