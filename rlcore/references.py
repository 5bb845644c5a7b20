"""Records that stay on the node where they were made: the buffer holds a reference, and a reader
gets a record's bytes from the shard that keeps them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlcore.errors import StageError
from rlcore.pickling import ByFields


@dataclass(frozen=True, slots=True)
class RecordReference(ByFields):
    """A record in a shard; as long as the record. Example: RecordReference("shard-1", 7, 4096)"""

    shard: str
    key: int  # unique in its shard
    size: int  # bytes

    def __len__(self) -> int:
        return self.size


Record = bytes | RecordReference
# Keys by shard -> the records of these keys by shard. Raises ShardLost.
Fetch = Callable[[Mapping[str, Sequence[int]]], Mapping[str, Sequence[bytes]]]


class ShardLost(StageError):
    """The records of a shard cannot be read any more."""


def read_records(records: Sequence[Record], fetch: Fetch) -> list[bytes]:
    """The bytes of records; each shard is asked once, for all of its records. Raises ShardLost."""
    keys = keys_by_shard(records)
    found = fetch(keys) if keys else {}
    read = {
        (shard, key): record
        for shard, its in keys.items()
        for key, record in zip(its, found[shard], strict=True)
    }
    return [r if isinstance(r, bytes) else read[r.shard, r.key] for r in records]


def keys_by_shard(records: Iterable[Record]) -> dict[str, list[int]]:
    """The keys of the records that are in shards, by shard."""
    keys: dict[str, list[int]] = defaultdict(list)
    for record in records:
        if isinstance(record, RecordReference):
            keys[record.shard].append(record.key)
    return dict(keys)
