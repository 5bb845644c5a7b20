"""The buffer on disk: one folder with the state and the scores as JSON, and the records.

    state.json     {"format", "version", "checksum", "state"}: checksum of the state's JSON text
    scores.json    the scores of all samples (`serialization.dump_scores`)
    records.bin    the records of `rlcore.serialization`, end to end; state["sizes"] cuts them
    records-*.bin  those that shards keep, each file written by its shard and read by one; state
                   ["files"] names all files, and ["places"] says in which one each record is

`save` writes a folder beside, flushes it to disk and renames it, so a folder under the final name
is complete. The checksums (BLAKE2b) of all files are verified before anything is used. Records
and scores that are not paired yet are in no snapshot: their samples are asked for again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcore.buffer import reports
from rlcore.buffer.entry import Entry, EntryCut
from rlcore.buffer.ledger import Ledger
from rlcore.buffer.record_files import (
    JournalError,
    ReadShards,
    RecordFile,
    WriteShards,
    Written,
    dealt,
    file_of,
    no_shards,
    read_records,
    spans,
    write_records,
)
from rlcore.buffer.statistics import ArrivalTotals
from rlcore.buffer.store import ReplayBuffer
from rlcore.files import new_folder, replace_file
from rlcore.json_text import dump_large
from rlcore.references import Record, RecordReference, keys_by_shard
from rlcore.serialization import dump_scores, load_scores
from rlcore.types import Score

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
class Cut:
    """What a snapshot is made of; `groups` of its state are still to come."""

    state: dict[str, Any]
    entries: list[EntryCut]  # ascending by group id


def cut(buffer: ReplayBuffer) -> Cut:
    """What a checkpoint of this moment needs, unaffected by what happens to the buffer later.
    Cheap, since its process answers nobody meanwhile."""
    live, intake, batches = buffer.live, buffer.intake, buffer.batches
    state = {
        "published": live.published,
        "learner": live.learner,
        "completed_bytes": list(live.completed_bytes),
        "ledger": live.ledger.state(),
        "tasks": live.accounts.state(),
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
    return Cut(state, [live.entries[i].cut() for i in sorted(live.entries)])


def snapshot(cut: Cut) -> Snapshot:
    """All of it. Safe to run in another thread."""
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


def save(directory: str | Path, cut: Cut, write: WriteShards = no_shards) -> Written:
    """Write a buffer to a folder that must not exist yet. Safe to run in another thread.

    `write`: has shards write what they keep. Raises FileExistsError if the folder exists, OSError
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
        checksums = {RECORDS: write_records(folder / RECORDS, here)}
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
    """What `save` wrote, to `restore` a fresh buffer from. Safe to run in another thread.

    `shards`: names of those that there are now: the records that shards wrote are read by these,
    through `read_shards`, and are references in the snapshot. Without any, all records are read
    here. Raises JournalError if the journal is missing, damaged or of another version, and RoleLost
    if a shard is lost.
    """
    folder = Path(directory)
    try:
        state = _read_state(folder)
        scores = load_scores(_checked(folder, SCORES, state).decode())
        names, places, sizes = state["files"], state["places"], state["sizes"]
        files = _record_files(state)
        here, there = (files[:1], files[1:]) if shards else (files, [])
        found: dict[str, Iterator[Record]] = {f.name: iter(read_records(folder, f)) for f in here}
        given = dealt(there, shards)
        keys = read_shards(folder, given) if given else {}
        for shard, its in given.items():
            for file, first in zip(its, keys[shard], strict=True):
                found[file.name] = _references(shard, first, file.sizes)
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


def _references(shard: str, first: int, sizes: Sequence[int]) -> Iterator[Record]:
    return (RecordReference(shard, first + i, size) for i, size in enumerate(sizes))


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
