"""The records of one node, kept for the buffer, which has references to them. Single-threaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlcore.references import Fetch, RecordReference, ShardLost, read_records
from rlcore.serialization import RecordHeader, StoredEpisode, StoredGroup, read_header

Kept = list[tuple[RecordHeader, RecordReference]]


class Shard:
    """Records by key."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bytes = 0
        self._records: dict[int, bytes] = {}
        self._next = 0

    def put(self, records: Sequence[bytes]) -> Kept:
        """Keep records; what the buffer needs to know of them. Raises ValueError, keeping none, if
        one is malformed."""
        headers = [read_header(record) for record in records]
        first = self.keep(records)
        return [
            (header, RecordReference(self.name, key, len(record)))
            for key, (header, record) in enumerate(zip(headers, records), first)
        ]

    def keep(self, records: Sequence[bytes]) -> int:
        """Keep records that the buffer knows already; the key of the first, after which the others
        have theirs."""
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
        """Forget records that nobody will read any more."""
        for key in keys:
            record = self._records.pop(key, None)
            if record is not None:
                self.bytes -= len(record)


def with_records(groups: Sequence[StoredGroup], fetch: Fetch) -> list[StoredGroup]:
    """Groups with all their records, each shard asked once. Raises ShardLost."""
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
