"""The buffer on disk: one folder with the state and the scores as JSON, and the records.

    state.json     {"format", "version", "checksum", "state"}: checksum of the state's JSON text
    scores.json    the scores of all samples (`serialization.dump_scores`)
    records.bin    the records of `rlcore.serialization`, end to end; state["ends"] cuts them

`save` writes a folder beside, flushes it to disk and renames it, so a folder under the final name
is complete. `load` verifies the checksums (BLAKE2b) of all three before it uses anything. Records
and scores that are not paired yet are in no snapshot: their samples are asked for again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.buffer import reports
from rlcore.buffer.entry import Entry
from rlcore.buffer.ledger import Ledger
from rlcore.buffer.statistics import ArrivalTotals
from rlcore.buffer.store import ReplayBuffer
from rlcore.files import new_file, new_folder, replace_file
from rlcore.references import Fetch, Record, RecordReference, read_records
from rlcore.serialization import dump_scores, load_scores
from rlcore.types import Score

FORMAT = "rlcore.buffer"
VERSION = 3
STATE = "state.json"
SCORES = "scores.json"
RECORDS = "records.bin"
PART_BYTES = 64 << 20  # of records that are fetched from shards at once


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


def save(directory: str | Path, saved: Snapshot, fetch: Fetch | None = None) -> Written:
    """Write a snapshot to a folder that must not exist yet. Safe to run in another thread.

    `fetch`: reads what shards keep, a part at a time. Raises FileExistsError if the folder exists,
    OSError (a full disk) and ShardLost with nothing under the final name.
    """
    scores = dump_scores(saved.scores).encode()
    ends = np.cumsum([len(record) for record in saved.records], dtype=np.int64).tolist()
    with new_folder(directory) as folder:
        checksums = {RECORDS: _write(folder / RECORDS, saved.records, fetch)}
        replace_file(folder / SCORES, scores, durable=True)
        checksums[SCORES] = _checksum(scores)
        more = {"ends": ends, "checksums": checksums}
        text = json.dumps({**saved.state, **more}, separators=(",", ":"))
        document = {
            "format": FORMAT,
            "version": VERSION,
            "checksum": _checksum(text.encode()),
            "state": text,
        }
        replace_file(folder / STATE, json.dumps(document), durable=True)
    return Written(Path(directory) / RECORDS, [0, *ends], saved.elsewhere)


def _write(path: Path, records: Sequence[Record], fetch: Fetch | None) -> str:
    """Write records end to end; their checksum. No more than PART_BYTES of them are fetched at
    once."""
    digest = hashlib.blake2b(digest_size=16)
    with new_file(path, durable=True) as file:
        for part in _parts(records):
            for record in part if fetch is None else read_records(part, fetch):
                assert isinstance(record, bytes)
                file.write(record)
                digest.update(record)
    return digest.hexdigest()


def _parts(records: Sequence[Record]) -> Iterator[list[Record]]:
    part: list[Record] = []
    size = 0
    for record in records:
        part.append(record)
        size += len(record)
        if size >= PART_BYTES:
            yield part
            part, size = [], 0
    yield part


class Written:
    """The records of a checkpoint that shards keep too, readable when a shard is lost: also after
    its folder was renamed or removed, since the file stays open."""

    def __init__(
        self, path: Path, ends: Sequence[int], places: Mapping[tuple[int, int, str], slice]
    ) -> None:
        """`ends`: of all records in the file, behind a 0."""
        self._ends = ends
        self._places = places
        self._file = path.open("rb") if places else None

    def read(self, group_id: int, sample_index: int, draw_id: str) -> tuple[bytes, ...] | None:
        """The records of a sample by part, if they are in it."""
        place = self._places.get((group_id, sample_index, draw_id))
        if place is None or self._file is None:
            return None
        spans = pairwise(self._ends[place.start : place.stop + 1])
        return tuple(os.pread(self._file.fileno(), end - start, start) for start, end in spans)

    def close(self) -> None:
        """A newer one takes its place."""
        if self._file is not None:
            self._file.close()


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
        records = _checked(directory, RECORDS, state)
        scores = load_scores(_checked(directory, SCORES, state).decode())
        ends = [0, *state["ends"]]
    except JournalError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise JournalError(
            f"{directory}: no readable buffer journal: {type(error).__name__}: {error}"
        ) from error
    return Snapshot(state, [records[start:end] for start, end in pairwise(ends)], scores)


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
