"""The records of a checkpoint: files of records end to end, each written and read by whoever keeps
them, the buffer or a shard. What they must be is in the journal (`rlcore.buffer.journal`)."""

from __future__ import annotations

import hashlib
import heapq
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rlcore.errors import StageError
from rlcore.files import new_file


class JournalError(ValueError):
    """The journal is missing, damaged or of another format. Nothing of it was loaded."""


@dataclass(frozen=True, slots=True)
class RecordFile:
    """A file of a journal. Example: RecordFile("records.bin", [4096, 4100], "09f3...")"""

    name: str
    sizes: list[int]  # bytes of its records, in order
    checksum: str  # BLAKE2b of all of it

    @property
    def size(self) -> int:
        """Bytes of all its records."""
        return sum(self.sizes)


# (folder, keys by shard) -> the checksum of the file that each shard has written there, under the
# name `file_of`. Raises ShardLost.
WriteShards = Callable[[Path, Mapping[str, Sequence[int]]], Mapping[str, str]]
# (folder, files by shard) -> for each file the key of its first record in that shard; the others
# have those after it. Raises RoleLost if a shard is lost, and JournalError.
ReadShards = Callable[[Path, Mapping[str, Sequence[RecordFile]]], Mapping[str, Sequence[int]]]


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """How shards are told to write and read their parts of a checkpoint, as `WriteShards` and
    `ReadShards` with a deadline in seconds after the other arguments. Both block, and raise
    DeadlineExceeded."""

    write: Callable[[Path, Mapping[str, Sequence[int]], float], Mapping[str, str]]
    read: Callable[[Path, Mapping[str, Sequence[RecordFile]], float], Mapping[str, Sequence[int]]]


def no_shards(folder: Path, files: Mapping[str, object], timeout_s: float = 0.0) -> NoReturn:
    """What a buffer without shards has in place of them; never called."""
    raise StageError(f"there are no shards to read or write {sorted(files)}")


NO_SHARDS = ShardFiles(no_shards, no_shards)


def file_of(shard: str) -> str:
    """The name of the file that a shard writes."""
    return f"records-{shard}.bin"


def write_records(path: Path, records: Iterable[bytes]) -> str:
    """Write records end to end; their checksum."""
    digest = hashlib.blake2b(digest_size=16)
    with new_file(path, durable=True) as file:
        for record in records:
            file.write(record)
            digest.update(record)
    return digest.hexdigest()


def read_records(folder: Path, file: RecordFile) -> list[bytes]:
    """The records of a file. Raises JournalError if it is not as it was written."""
    path, digest, records = folder / file.name, hashlib.blake2b(digest_size=16), []
    try:
        with path.open("rb") as source:
            for size in file.sizes:
                records.append(source.read(size))
                digest.update(records[-1])
            digest.update(source.read())
    except OSError as e:
        raise JournalError(
            f"{path}: cannot be read: {e.strerror}; run_dir must be one folder for all nodes"
        ) from e
    if digest.hexdigest() != file.checksum:
        raise JournalError(f"{path.parent}: {path.name} does not match its checksum")
    return records


def dealt(files: Iterable[RecordFile], shards: Sequence[str]) -> dict[str, list[RecordFile]]:
    """Files by the shard that is to read them: the largest first, each to the one that has least.
    Shards without a file are left out."""
    loads = [(0, place) for place in range(len(shards))]
    found: dict[str, list[RecordFile]] = {}
    for file in sorted(files, key=lambda f: (-f.size, f.name)):
        load, place = heapq.heappop(loads)
        found.setdefault(shards[place], []).append(file)
        heapq.heappush(loads, (load + file.size, place))
    return found


@dataclass(frozen=True, slots=True)
class Span:
    """Where a record is: in a file of the folder, from byte `start` to `end`."""

    file: str
    start: int
    end: int


def spans(sizes: Sequence[int], files: Sequence[str], places: Sequence[int]) -> list[Span]:
    """Where all records are, of which `places` says in which of the files each is."""
    at = [0] * len(files)
    found = []
    for size, place in zip(sizes, places, strict=True):
        found.append(Span(files[place], at[place], at[place] + size))
        at[place] += size
    return found


class Written:
    """The records of a checkpoint that shards keep too, readable when a shard is lost, also after
    the folder was renamed."""

    def __init__(
        self, directory: Path, spans: Sequence[Span], places: Mapping[tuple[int, int, str], slice]
    ) -> None:
        """`spans`: of all records. `places`: of the samples that shards keep, in `spans`."""
        self._spans = spans
        self._places = places
        self._folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY) if places else None

    def read(self, group_id: int, sample_index: int, draw_id: str) -> tuple[bytes, ...] | None:
        """The records of a sample by part, if they are in it and it has not been removed."""
        place = self._places.get((group_id, sample_index, draw_id))
        if place is None or self._folder is None:
            return None
        try:
            return tuple(self._read(span) for span in self._spans[place])
        except FileNotFoundError:
            return None

    def _read(self, span: Span) -> bytes:
        file = os.open(span.file, os.O_RDONLY, dir_fd=self._folder)
        try:
            return os.pread(file, span.end - span.start, span.start)
        finally:
            os.close(file)

    def close(self) -> None:
        """A newer one takes its place."""
        if self._folder is not None:
            os.close(self._folder)
