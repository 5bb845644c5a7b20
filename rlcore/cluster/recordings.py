"""The batches that a learner trained on, kept on disk so that a step can be re-executed.

    RUN_DIR/recorder/step_000012/policy-0.bin     one share of the batch of step 12

A share is written by the rank that fetched it, beside training. Batches are kept back to a
checkpoint that precedes the last `logging.recorder.steps` steps: from it `rlcore replay` trains
again, which gives the optimizer's state to the bit.

A file holds the length of its head (8 bytes, little-endian), the head as JSON, its BLAKE2b digest
(16 bytes), and the records of `rlcore.serialization` end to end.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rlcore.errors import StageError
from rlcore.files import new_file
from rlcore.serialization import StoredEpisode, StoredGroup, dump_scores, load_scores

FORMAT = "rlcore.recording"
VERSION = 1
DIGEST = 16  # bytes
FOLDER = "recorder"  # of a run directory


class RecordingError(StageError):
    """A recording is missing, damaged or of another version."""


def folder_of(run_dir: str | Path, step: int) -> Path:
    """Where the shares of a step's batch are. `step`: the version that was trained on it."""
    return Path(run_dir) / FOLDER / f"step_{step:06d}"


def steps_in(folder: Path) -> list[int]:
    """Steps that a folder of `step_*` entries has, in order."""
    names = (path.name.removeprefix("step_") for path in folder.glob("step_*"))
    return sorted(int(name) for name in names if name.isdecimal())


def dump_groups(groups: Sequence[StoredGroup]) -> tuple[bytes, list[bytes]]:
    """The head of a recording, and its records. The groups hold bytes, not references."""
    records = [_whole(r) for g in groups for e in g.episodes for r in e.records]
    body = hashlib.blake2b(digest_size=DIGEST)
    for record in records:
        body.update(record)
    head = {
        "format": FORMAT,
        "version": VERSION,
        "checksum": body.hexdigest(),
        "groups": [
            {
                "group_id": g.group_id,
                "prompt_id": g.prompt_id,
                "admitted_version": g.admitted_version,
                "arrival_version": g.arrival_version,
                "sizes": [[len(r) for r in e.records] for e in g.episodes],
            }
            for g in groups
        ],
        "scores": dump_scores([e.score for g in groups for e in g.episodes]),
    }
    return json.dumps(head).encode(), records


def _whole(record: object) -> bytes:
    if not isinstance(record, bytes):
        raise TypeError(f"a recording holds bytes, not {type(record).__name__}")
    return record


def write_recording(path: Path, groups: Sequence[StoredGroup]) -> int:
    """Write one share; its bytes. Raises OSError."""
    head, records = dump_groups(groups)
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [len(head).to_bytes(8, "little"), head, _digest(head), *records]
    with new_file(path) as file:
        for part in parts:
            file.write(part)
    return sum(map(len, parts))


def read_recording(path: Path) -> list[StoredGroup]:
    """The inverse of `write_recording`. Raises RecordingError, which names the file."""
    try:
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        head, digest, body = (
            data[8 : 8 + size],
            data[8 + size :][:DIGEST],
            data[8 + size + DIGEST :],
        )
        if digest != _digest(head):
            raise ValueError("its head does not match its checksum")
        document = json.loads(head)
        if (document["format"], document["version"]) != (FORMAT, VERSION):
            raise ValueError(f"it is of version {document['version']}, and {VERSION} is read")
        if _digest(body).hex() != document["checksum"]:
            raise ValueError("its records do not match their checksum")
    except (OSError, ValueError, KeyError) as error:
        raise RecordingError(f"the recording {path} cannot be read: {error}") from error
    scores = iter(load_scores(document["scores"]))
    groups, at = [], 0
    for fields in document["groups"]:
        episodes = []
        for sizes in fields.pop("sizes"):
            records = []
            for length in sizes:
                records.append(body[at : at + length])
                at += length
            episodes.append(StoredEpisode(next(scores), tuple(records)))
        groups.append(StoredGroup(**fields, episodes=tuple(episodes)))
    return groups


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST).digest()


class Recorder:
    """Keeps the batches of a run that one rank fetches."""

    def __init__(self, run_dir: str | Path, share: str, *, steps: int, most_bytes: float) -> None:
        """`share`: the name of the files, such as "policy-0". `most_bytes`: of this share's."""
        self._run_dir = Path(run_dir)
        self._share = f"{share}.bin"
        self._steps = steps
        self._most = most_bytes
        self._off = False

    def keep(self, step: int, groups: Sequence[StoredGroup]) -> None:
        """Write the batch of `step`, and remove those that are not needed or do not fit. A disk
        that refuses ends the recording, not the run."""
        if self._off:
            return
        try:
            write_recording(folder_of(self._run_dir, step) / self._share, groups)
            self._prune(step)
        except OSError as error:
            self._off = True
            _say(f"the recorder is off (logging.recorder): {error}")

    def _prune(self, newest: int) -> None:
        kept = {s: self._file(s).stat().st_size for s in self._recorded() if s <= newest}
        checkpoints = steps_in(self._run_dir / "checkpoints")
        first = max((s for s in checkpoints if s <= newest + 1 - self._steps), default=0)
        for step in [s for s in kept if s < first]:
            self._remove(step)
            del kept[step]
        dropped = []
        while sum(kept.values()) > self._most and len(kept) > 1:
            dropped.append(min(kept))
            self._remove(dropped[-1])
            del kept[dropped[-1]]
        if dropped:
            _say(
                f"the recorder dropped steps {dropped[0] + 1} to {dropped[-1] + 1} of {self._share}"
                ": its bytes are those of logging.recorder.max_gib"
            )

    def _recorded(self) -> list[int]:
        return [s for s in steps_in(self._run_dir / FOLDER) if self._file(s).is_file()]

    def _file(self, step: int) -> Path:
        return folder_of(self._run_dir, step) / self._share

    def _remove(self, step: int) -> None:
        self._file(step).unlink(missing_ok=True)
        folder = folder_of(self._run_dir, step)
        if not any(folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)  # another share may have been faster


def _say(sentence: str) -> None:
    """To the run's log, which has every role's standard error."""
    print(sentence, file=sys.stderr, flush=True)
