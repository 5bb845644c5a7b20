"""The buffer on disk: one folder with the state and the scores as JSON, and the records.

    state.json     {"format", "version", "checksum", "state"}: checksum of the state's JSON text
    scores.json    the scores of all samples (`serialization.dump_scores`)
    records.bin    the records of `rlcore.serialization`, end to end; state["sizes"] cuts them
    records-*.bin  those that shards keep, each file written by its shard and read by one; state
                   ["files"] names all files, and ["places"] says in which one each record is

`save` writes a temporary folder, flushes it to disk and renames it, so a folder under the final
name is complete. The checksums (BLAKE2b) of all files are verified before anything is used. Records
and scores that are not paired yet are in no snapshot: their samples are requested again."""

from __future__ import annotations

import hashlib
import heapq
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from rlcore.buffer import store
from rlcore.buffer.intake import ArrivalTotals
from rlcore.buffer.ledger import Ledger
from rlcore.buffer.live import EntryCut, LiveGroup
from rlcore.buffer.store import ReplayBuffer
from rlcore.errors import StageError
from rlcore.files import dump_large, new_file, new_folder, replace_file
from rlcore.references import Record, RecordReference, keys_by_shard
from rlcore.serialization import dump_scores, load_scores
from rlcore.types import Score


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
    """The calls by which shards write and read their parts of a checkpoint: `WriteShards` and
    `ReadShards` with a deadline in seconds as last argument. Both block, and raise
    DeadlineExceeded."""

    write: Callable[[Path, Mapping[str, Sequence[int]], float], Mapping[str, str]]
    read: Callable[[Path, Mapping[str, Sequence[RecordFile]], float], Mapping[str, Sequence[int]]]


def no_shards(folder: Path, files: Mapping[str, object], timeout_s: float = 0.0) -> NoReturn:
    """Stand in for the reader of shards in a buffer without shards; never called."""
    raise StageError(f"there are no shards to read or write {sorted(files)}")


NO_SHARDS = ShardFiles(no_shards, no_shards)


def file_of(shard: str) -> str:
    """The name of the file that a shard writes."""
    return f"records-{shard}.bin"


def write_record_file(path: Path, records: Iterable[bytes]) -> str:
    """Write records end to end; returns their checksum."""
    digest = hashlib.blake2b(digest_size=16)
    with new_file(path, durable=True) as file:
        for record in records:
            file.write(record)
            digest.update(record)
    return digest.hexdigest()


def read_record_file(folder: Path, file: RecordFile) -> list[bytes]:
    """The records of a file. Raises JournalError if its checksum differs."""
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
    """Files by the shard that reads them: the largest file first, each to the shard with the fewest
    bytes. Shards without a file are left out."""
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
    """The span of each record; `places` says in which file each is."""
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
        """The records of a sample by part, None unless the checkpoint holds them and still
        exists."""
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
        """Stop reading: a newer checkpoint replaces this one."""
        if self._folder is not None:
            os.close(self._folder)


FORMAT = "rlcore.buffer"
VERSION = 4
STATE = "state.json"
SCORES = "scores.json"
RECORDS = "records.bin"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A buffer at one moment; records and scores by group, sample and part."""

    state: dict[str, Any]  # JSON-able
    records: list[Record]
    scores: list[Score]
    # (group id, sample index, draw id) of the samples that shards keep -> their first and last
    # record, as a slice
    elsewhere: dict[tuple[int, int, str], slice] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BufferSnapshot:
    """The contents of a snapshot; the `groups` of its state are still to be added."""

    state: dict[str, Any]
    entries: list[EntryCut]  # ascending by group id


def cut(buffer: ReplayBuffer) -> BufferSnapshot:
    """Return the contents of a checkpoint of this moment; later changes of the buffer do not affect
    them. Cheap, since the buffer's process answers no call meanwhile."""
    live, intake, batches = buffer.live, buffer.intake, buffer.batches
    state = {
        "published": live.published,
        "learner": live.learner,
        "completed_bytes": list(live.arrived_bytes),
        "ledger": live.ledger.state(),
        "tasks": live.accounts.state(),
        "duplicates": intake.duplicates,
        "late": intake.late,
        "unreadable": intake.unreadable,
        "failed_score": intake.failed_score,
        "resampled": live.resampled,
        "outcomes": [list(outcome) for outcome in intake.outcomes],
        "arrivals": intake.totals.state(),
        "next_step": batches.next_step,
        "drawn": dict(batches.sampler.drawn),
        "weights": batches.sampler.weights,
        "taken": {str(step): list(ids) for step, ids in batches.taken.items()},
        "pinned": {str(step): list(ids) for step, ids in batches.pinned.items()},
    }
    return BufferSnapshot(state, [live.entries[i].cut() for i in sorted(live.entries)])


def snapshot(cut: BufferSnapshot) -> Snapshot:
    """The whole snapshot. Safe to run in another thread."""
    samples = [s for e in cut.entries for _, s in e.ordered()]
    records = [record for s in samples for record in s.records]
    scores = [s.score for s in samples]
    kept = _elsewhere(records, scores, (len(s.records) for s in samples))
    state = {**cut.state, "groups": [e.state() for e in cut.entries]}
    return Snapshot(state, records, scores, kept)


def restore(buffer: ReplayBuffer, saved: Snapshot) -> None:
    """Continue from a snapshot: uncommitted batches will be taken again, groups in flight keep
    their ids and admitted versions and are listed by `buffer.in_flight()`.

    If the settings changed since, groups that can no longer be trained on in time are evicted as
    stale. Groups that have as many samples as the settings now ask for are finished. Raises
    LedgerError if the snapshot contradicts itself.
    """
    state, records, scores = saved.state, iter(saved.records), iter(saved.scores)
    live, intake, batches = buffer.live, buffer.intake, buffer.batches
    live.published = state["published"]
    live.learner = state["learner"]
    live.arrived_bytes = (state["completed_bytes"][0], state["completed_bytes"][1])
    live.ledger = Ledger.from_state(state["ledger"])
    # one of an earlier version of this program counts by task from now on
    live.accounts.restore(state.get("tasks", {}))
    entries = [LiveGroup.from_state(fields, records, scores) for fields in state["groups"]]
    live.restore(entries)
    intake.duplicates = state["duplicates"]
    intake.late = state["late"]
    intake.unreadable = state.get("unreadable", 0)  # not in earlier ones
    intake.failed_score = state["failed_score"]
    live.resampled = state.get("resampled", 0)
    intake.outcomes = [(g, prompt_id, rate) for g, prompt_id, rate in state.get("outcomes", [])]
    intake.totals = ArrivalTotals.from_state(state["arrivals"])
    batches.next_step = state["next_step"]
    # A journal of before there were several tasks has no weights, which is what one task has.
    batches.sampler.restore(state["drawn"], state.get("weights"))
    batches.taken = {int(step): list(ids) for step, ids in state["taken"].items()}
    batches.pinned = {int(step): list(ids) for step, ids in state["pinned"].items()}
    batches.forget()
    store.audit(buffer)
    intake.resume()
    batches.resume()


def save(directory: str | Path, cut: BufferSnapshot, write: WriteShards = no_shards) -> Written:
    """Write a buffer to a folder that must not exist yet. Safe to run in another thread.

    `write`: has shards write their records. Raises FileExistsError if the folder exists, OSError
    (a full disk) and ShardLost with nothing under the final name.
    """
    saved = snapshot(cut)
    scores = dump_scores(saved.scores).encode()
    keys = keys_by_shard(saved.records)
    files = [RECORDS, *map(file_of, keys)]
    number = {shard: i for i, shard in enumerate(keys, 1)}
    places = [0 if isinstance(r, bytes) else number[r.shard] for r in saved.records]
    sizes = [len(record) for record in saved.records]
    with new_folder(directory) as folder:
        here = (record for record in saved.records if isinstance(record, bytes))
        checksums = {RECORDS: write_record_file(folder / RECORDS, here)}
        if keys:
            checksums |= {file_of(s): made for s, made in write(folder, keys).items()}
        replace_file(folder / SCORES, scores, durable=True)
        checksums[SCORES] = _checksum(scores)
        more = {"sizes": sizes, "files": files, "places": places, "checksums": checksums}
        text = dump_large({**saved.state, **more})
        document = {
            "format": FORMAT,
            "version": VERSION,
            "checksum": _checksum(text.encode()),
            "state": text,
        }
        replace_file(folder / STATE, dump_large(document), durable=True)
    return Written(Path(directory), spans(sizes, files, places), saved.elsewhere)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A journal that was read."""

    snapshot: Snapshot
    written: Written


def read(
    directory: str | Path, shards: Sequence[str] = (), read_shards: ReadShards = no_shards
) -> Loaded:
    """Read the files of `save`, to `restore` a fresh buffer from. Safe to run in another thread.

    `shards`: names of the present shards, which read the records that shards wrote, through
    `read_shards`; the snapshot holds references to them. Without shards, all records are read here.
    Raises JournalError if the journal is missing, damaged or of another version, and RoleLost if a
    shard is lost.
    """
    folder = Path(directory)
    try:
        state = _read_state(folder)
        scores = load_scores(_checked(folder, SCORES, state).decode())
        names, places, sizes = state["files"], state["places"], state["sizes"]
        files = _record_files(state)
        here, there = (files[:1], files[1:]) if shards else (files, [])
        found: dict[str, Iterator[Record]] = {
            f.name: iter(read_record_file(folder, f)) for f in here
        }
        given = dealt(there, shards)
        keys = read_shards(folder, given) if given else {}
        for shard, its in given.items():
            for file, first in zip(its, keys[shard], strict=True):
                places_in = enumerate(file.sizes, first)
                found[file.name] = iter([RecordReference(shard, at, n) for at, n in places_in])
        records = [next(found[names[place]]) for place in places]
        kept = _elsewhere(records, scores, _counts(state))
        snapshot = Snapshot(state, records, scores, kept)
        return Loaded(snapshot, Written(folder, spans(sizes, names, places), kept))
    except JournalError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise JournalError(
            f"{directory}: no readable buffer journal: {type(error).__name__}: {error}"
        ) from error


def _read_state(directory: Path) -> dict[str, Any]:
    document = json.loads((directory / STATE).read_bytes())
    _check_version(directory, document)
    if _checksum(document["state"].encode()) != document["checksum"]:
        raise JournalError(f"{directory}: {STATE} does not match its checksum")
    return dict(json.loads(document["state"]))


def _record_files(state: Mapping[str, Any]) -> list[RecordFile]:
    sizes: list[list[int]] = [[] for _ in state["files"]]
    for size, place in zip(state["sizes"], state["places"], strict=True):
        sizes[place].append(size)
    return [RecordFile(n, its, state["checksums"][n]) for n, its in zip(state["files"], sizes)]


def _counts(state: Mapping[str, Any]) -> Iterator[int]:
    """Records of each sample."""
    return (s["records"] for group in state["groups"] for s in group["samples"].values())


def _elsewhere(
    records: Sequence[Record], scores: Sequence[Score], counts: Iterable[int]
) -> dict[tuple[int, int, str], slice]:
    """As `Snapshot.elsewhere`."""
    found, start = {}, 0
    for score, count in zip(scores, counts, strict=True):
        place = slice(start, start + count)
        if any(isinstance(r, RecordReference) for r in records[place]):
            found[score.group_id, score.sample_index, score.draw_id] = place
        start += count
    return found


def _check_version(directory: Path, document: Mapping[str, Any]) -> None:
    if document["format"] != FORMAT:
        raise JournalError(f"{directory}: not a journal of format {FORMAT}")
    if document["version"] != VERSION:
        raise JournalError(
            f"{directory}: a buffer journal of version {document['version']} cannot be read: this "
            f"program reads version {VERSION}, so continue the run with the rlcore that wrote it"
        )


def _checked(directory: Path, name: str, state: Mapping[str, Any]) -> bytes:
    data = (directory / name).read_bytes()
    if _checksum(data) != state["checksums"][name]:
        raise JournalError(f"{directory}: {name} does not match its checksum")
    return data


def _checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
