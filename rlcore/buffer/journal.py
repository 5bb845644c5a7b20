"""The buffer on disk: one folder with the state and the scores as JSON, and the records.

    state.json     {"format", "version", "checksum", "state"}: checksum of the state's JSON text
    scores.json    the scores of all samples (`serialization.dump_scores`)
    records.bin    the records of `rlcore.serialization`, end to end; state["sizes"] cuts them
    records-*.bin  those that shards keep, each file written by its shard; state["files"] names all
                   files, and state["places"] says in which one each record is

`save` writes a folder beside, flushes it to disk and renames it, so a folder under the final name
is complete. `load` verifies the checksums (BLAKE2b) of all files before it uses anything. Records
and scores that are not paired yet are in no snapshot: their samples are asked for again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcore.buffer import reports
from rlcore.buffer.entry import Entry
from rlcore.buffer.ledger import Ledger
from rlcore.buffer.statistics import ArrivalTotals
from rlcore.buffer.store import ReplayBuffer
from rlcore.files import new_file, new_folder, replace_file
from rlcore.references import Record, RecordReference, keys_by_shard
from rlcore.serialization import dump_scores, load_scores
from rlcore.types import Score

FORMAT = "rlcore.buffer"
VERSION = 4
STATE = "state.json"
SCORES = "scores.json"
RECORDS = "records.bin"


# (folder, keys by shard) -> the checksum of the file that each shard has written there, under the
# name `file_of`. Raises ShardLost.
WriteShards = Callable[[Path, Mapping[str, Sequence[int]]], Mapping[str, str]]


class JournalError(ValueError):
    """The journal is missing, damaged or of another format. Nothing of it was loaded."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A buffer at one moment; records and scores by group, sample and part."""

    state: dict[str, Any]  # JSON-able
    records: list[Record]
    scores: list[Score]
    # (group id, sample index, draw id) of the samples that shards keep -> their first and last
    # record, as a slice
    elsewhere: dict[tuple[int, int, str], slice] = field(default_factory=dict)


def snapshot(buffer: ReplayBuffer) -> Snapshot:
    """Cheap, since records are held by reference, and unaffected by what happens to the buffer
    later."""
    live, intake, batches = buffer.live, buffer.intake, buffer.batches
    entries = [live.entries[i] for i in sorted(live.entries)]
    samples = [s for e in entries for _, s in sorted(e.samples.items())]
    state = {
        "published": live.published,
        "learner": live.learner,
        "completed_bytes": list(live.completed_bytes),
        "ledger": live.ledger.state(),
        "tasks": live.accounts.state(),
        "groups": [e.state() for e in entries],
        "duplicates": intake.duplicates,
        "late": intake.late,
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
    records: list[Record] = []
    elsewhere = {}
    for s in samples:
        records += s.records
        if any(isinstance(r, RecordReference) for r in s.records):
            place = slice(len(records) - len(s.records), len(records))
            elsewhere[s.score.group_id, s.score.sample_index, s.score.draw_id] = place
    return Snapshot(state, records, [s.score for s in samples], elsewhere)


def restore(buffer: ReplayBuffer, saved: Snapshot) -> None:
    """Continue from a snapshot: uncommitted batches will be taken again, groups in flight are
    listed by `buffer.in_flight()`.

    If the settings changed since, groups that can no longer be trained on in time are evicted as
    stale, and groups that have as many samples as are asked for now are finished. Raises
    LedgerError if the snapshot contradicts itself.
    """
    state, records, scores = saved.state, iter(saved.records), iter(saved.scores)
    live, intake, batches = buffer.live, buffer.intake, buffer.batches
    live.published = state["published"]
    live.learner = state["learner"]
    live.completed_bytes = (state["completed_bytes"][0], state["completed_bytes"][1])
    live.ledger = Ledger.from_state(state["ledger"])
    # one of an earlier version of this program counts by task from now on
    live.accounts.restore(state.get("tasks", {}))
    entries = [Entry.from_state(fields, records, scores) for fields in state["groups"]]
    live.restore(entries)
    intake.duplicates = state["duplicates"]
    intake.late = state["late"]
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
    reports.audit(buffer)
    intake.resume()
    batches.resume()


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


def save(directory: str | Path, saved: Snapshot, write: WriteShards | None = None) -> Written:
    """Write a snapshot to a folder that must not exist yet. Safe to run in another thread.

    `write`: has shards write what they keep. Raises FileExistsError if the folder exists, OSError
    (a full disk) and ShardLost with nothing under the final name.
    """
    scores = dump_scores(saved.scores).encode()
    keys = keys_by_shard(saved.records)
    files = [RECORDS, *map(file_of, keys)]
    number = {shard: i for i, shard in enumerate(keys, 1)}
    places = [0 if isinstance(r, bytes) else number[r.shard] for r in saved.records]
    sizes = [len(record) for record in saved.records]
    with new_folder(directory) as folder:
        here = (record for record in saved.records if isinstance(record, bytes))
        checksums = {RECORDS: write_records(folder / RECORDS, here)}
        if keys:
            assert write is not None, "there are shards"
            checksums |= {file_of(s): made for s, made in write(folder, keys).items()}
        replace_file(folder / SCORES, scores, durable=True)
        checksums[SCORES] = _checksum(scores)
        more = {"sizes": sizes, "files": files, "places": places, "checksums": checksums}
        text = json.dumps({**saved.state, **more}, separators=(",", ":"))
        document = {
            "format": FORMAT,
            "version": VERSION,
            "checksum": _checksum(text.encode()),
            "state": text,
        }
        replace_file(folder / STATE, json.dumps(document), durable=True)
    return Written(Path(directory), _spans(sizes, files, places), saved.elsewhere)


@dataclass(frozen=True, slots=True)
class Span:
    """Where a record is: in a file of the folder, from byte `start` to `end`."""

    file: str
    start: int
    end: int


def _spans(sizes: Sequence[int], files: Sequence[str], places: Sequence[int]) -> list[Span]:
    at = [0] * len(files)
    spans = []
    for size, place in zip(sizes, places, strict=True):
        spans.append(Span(files[place], at[place], at[place] + size))
        at[place] += size
    return spans


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


def load(directory: str | Path, buffer: ReplayBuffer) -> None:
    """Restore a fresh buffer from a folder written by `save`.

    Groups in flight keep their ids and admitted versions. Raises JournalError if the journal is
    missing, damaged, or of another version.
    """
    restore(buffer, _read(Path(directory)))


def _read(directory: Path) -> Snapshot:
    try:
        document = json.loads((directory / STATE).read_bytes())
        _check_version(directory, document)
        if _checksum(document["state"].encode()) != document["checksum"]:
            raise JournalError(f"{directory}: {STATE} does not match its checksum")
        state = json.loads(document["state"])
        scores = load_scores(_checked(directory, SCORES, state).decode())
        files = {name: _checked(directory, name, state) for name in state["files"]}
        spans = _spans(state["sizes"], state["files"], state["places"])
        records: list[Record] = [files[span.file][span.start : span.end] for span in spans]
    except JournalError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise JournalError(
            f"{directory}: no readable buffer journal: {type(error).__name__}: {error}"
        ) from error
    return Snapshot(state, records, scores)


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
