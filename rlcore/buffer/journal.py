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
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.buffer.entry import Entry
from rlcore.buffer.ledger import Ledger
from rlcore.buffer.statistics import ArrivalTotals
from rlcore.buffer.store import ReplayBuffer
from rlcore.files import new_folder, replace_file
from rlcore.serialization import dump_scores, load_scores
from rlcore.types import Score

FORMAT = "rlcore.buffer"
VERSION = 3
STATE = "state.json"
SCORES = "scores.json"
RECORDS = "records.bin"


class JournalError(ValueError):
    """The journal is missing, damaged or of another format. Nothing of it was loaded."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A buffer at one moment; records and scores by group, sample and part."""

    state: dict[str, Any]  # JSON-able
    records: list[bytes]
    scores: list[Score]


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
        "outcomes": [list(outcome) for outcome in intake.outcomes],
        "arrivals": intake.totals.state(),
        "next_step": batches.next_step,
        "drawn": dict(batches.sampler.drawn),
        "weights": batches.sampler.weights,
        "taken": {str(step): list(ids) for step, ids in batches.taken.items()},
        "pinned": {str(step): list(ids) for step, ids in batches.pinned.items()},
    }
    return Snapshot(state, [r for s in samples for r in s.records], [s.score for s in samples])


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
    intake.outcomes = [(g, prompt_id, rate) for g, prompt_id, rate in state.get("outcomes", [])]
    intake.totals = ArrivalTotals.from_state(state["arrivals"])
    batches.next_step = state["next_step"]
    # A journal of before there were several tasks has no weights, which is what one task has.
    batches.sampler.restore(state["drawn"], state.get("weights"))
    batches.taken = {int(step): list(ids) for step, ids in state["taken"].items()}
    batches.pinned = {int(step): list(ids) for step, ids in state["pinned"].items()}
    batches.forget()
    live.check()
    batches.check()
    intake.resume()
    batches.resume()


def save(directory: str | Path, saved: Snapshot) -> None:
    """Write a snapshot to a folder that must not exist yet. Safe to run in another thread.

    Raises FileExistsError if the folder exists, OSError (a full disk) with nothing under the final
    name.
    """
    records = b"".join(saved.records)
    scores = dump_scores(saved.scores).encode()
    ends = np.cumsum([len(record) for record in saved.records], dtype=np.int64).tolist()
    checksums = {RECORDS: _checksum(records), SCORES: _checksum(scores)}
    text = json.dumps({**saved.state, "ends": ends, "checksums": checksums}, separators=(",", ":"))
    document = {
        "format": FORMAT,
        "version": VERSION,
        "checksum": _checksum(text.encode()),
        "state": text,
    }
    with new_folder(directory) as folder:
        replace_file(folder / RECORDS, records, durable=True)
        replace_file(folder / SCORES, scores, durable=True)
        replace_file(folder / STATE, json.dumps(document), durable=True)


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
