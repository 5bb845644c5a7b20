"""The batches that a learner trained on, kept on disk so that a step can be re-executed.

    RUN_DIR/recorder/step_000012/policy-0.bin     one share of the batch of step 12

A share is written by the rank that fetched it, during training. Batches are kept back to a
checkpoint that precedes the last `logging.recorder.steps` steps: from it `rlcore replay` trains
again, which gives the optimizer's state to the bit. The batches of a step with a warning are kept
longer, and so is the checkpoint before it, which is marked for that.

A file holds the length of its head (8 bytes, little-endian), the head as JSON, its BLAKE2b digest
(16 bytes), and the records of `rlcore.serialization` end to end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.errors import UserError
from rlcore.files import new_file
from rlcore.loop.checkpoint import PINNED, name_of
from rlcore.metrics.health import RECORDER, warned_steps
from rlcore.serialization import StoredEpisode, StoredGroup, dump_scores, load_scores

FORMAT = "rlcore.recording"
VERSION = 1
DIGEST = 16  # bytes


class RecordingError(UserError):
    """A recording is missing, damaged or of another version."""


def folder_of(run_dir: str | Path, step: int) -> Path:
    """The folder of the shares of a step's batch. `step`: the version that was trained on it."""
    return Path(run_dir) / RECORDER / f"step_{step:06d}"


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
    """Write one share; returns its bytes. Raises OSError."""
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
        head, rest = data[8 : 8 + size], data[8 + size :]
        digest, body = rest[:DIGEST], rest[DIGEST:]
        if digest != _digest(head):
            raise ValueError("its head does not match its checksum")
        document = json.loads(head)
        if (document["format"], document["version"]) != (FORMAT, VERSION):
            raise ValueError(f"it is of version {document['version']}, and {VERSION} is read")
        if _digest(body).hex() != document["checksum"]:
            raise ValueError("its records do not match their checksum")
        return _groups(document, body)
    except (OSError, ValueError, KeyError) as error:
        raise RecordingError(f"the recording {path} cannot be read: {error}.") from error


def _groups(document: Mapping[str, Any], body: bytes) -> list[StoredGroup]:
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

    def __init__(
        self,
        run_dir: str | Path,
        share: str,
        *,
        steps: int,
        most_bytes: float,
        pins: bool = True,
    ) -> None:
        """`share`: the name of the files, such as "policy-0". `most_bytes`: of this share's, and of
        checkpoints kept for warned steps, which one share `pins`."""
        self._run_dir = Path(run_dir)
        self._checkpoints = self._run_dir / "checkpoints"
        self._checkpoint_bytes: dict[int, int] = {}
        self._pins = pins
        self._share = f"{share}.bin"
        self._steps = steps
        self._most = most_bytes
        self._off = False
        self._sizes: dict[int, int] | None = None  # bytes by step; None: not looked at yet

    def keep(self, step: int, groups: Sequence[StoredGroup]) -> None:
        """Write the batch of `step`, and remove batches that are not needed or do not fit. A disk
        that refuses ends the recording, not the run."""
        if self._off:
            return
        try:
            if self._sizes is None:  # of earlier attempts; those after `step` are written again
                found = steps_in(self._run_dir / RECORDER)
                own = {s: self._file(s) for s in found if s < step}
                self._sizes = {s: f.stat().st_size for s, f in own.items() if f.is_file()}
            self._sizes[step] = write_recording(self._file(step), groups)
            self._prune(self._sizes, step)
        except OSError as error:
            self._off = True
            _say(f"the recorder is off (logging.recorder): {error}")

    def _prune(self, sizes: dict[int, int], newest: int) -> None:
        """Remove batches that no step needs. Above the budget the oldest batches of the last steps
        are removed first, then warned steps, the oldest first and each with all batches that it
        needs."""
        checkpoints = steps_in(self._checkpoints)
        first = max((s for s in checkpoints if s <= newest + 1 - self._steps), default=0)
        warned = self._warned(sizes, checkpoints)
        for step in [s for s in sizes if s < first and not _in(warned, s)]:
            self._remove(sizes, step)
        dropped: list[int] = []
        while sum(sizes.values()) > self._most and len(sizes) > 1:
            others = [s for s in sizes if not _in(warned, s)]
            gone = [min(others)] if others else []
            if not others or gone == [newest]:
                if not warned:
                    break
                gone = self._forget(warned, sizes, first)
            for step in gone:
                self._remove(sizes, step)
            dropped += gone
        if self._pins:
            dropped += self._pin(warned, sizes, first)
        if dropped:
            steps = ", ".join(str(step + 1) for step in sorted(dropped))
            _say(
                f"the recorder dropped {self._share} of steps {steps}: more do not fit "
                "logging.recorder.max_gib"
            )

    def _warned(self, sizes: dict[int, int], checkpoints: Sequence[int]) -> dict[int, int]:
        """Warned steps of which batches are here -> the checkpoint before each; 0: the start."""
        found = {}
        for step in (number - 1 for number in warned_steps(self._run_dir)):
            begin = max((s for s in checkpoints if s <= step), default=0)
            if any(begin <= s <= step for s in sizes):
                found[step] = begin
        return found

    def _forget(self, warned: dict[int, int], sizes: dict[int, int], first: int) -> list[int]:
        """Give up the oldest warned step; returns the batches that no other step needs."""
        oldest = min(warned)
        begin = warned.pop(oldest)
        return [s for s in sizes if begin <= s <= oldest and s < first and not _in(warned, s)]

    def _pin(self, warned: dict[int, int], sizes: dict[int, int], first: int) -> list[int]:
        """Mark the checkpoints that warned steps need, so that they stay, at most as many bytes of
        checkpoints as of batches. Returns the steps whose checkpoint does not fit."""
        dropped: list[int] = []
        while warned and sum(map(self._bytes, {*warned.values()})) > self._most:
            gone = self._forget(warned, sizes, first)
            for step in gone:
                self._remove(sizes, step)
            dropped += gone
        for step in steps_in(self._checkpoints):
            mark = self._checkpoints / name_of(step) / PINNED
            if step not in warned.values():
                mark.unlink(missing_ok=True)
            else:
                with contextlib.suppress(FileNotFoundError):  # it was removed just now
                    mark.touch()
        return dropped

    def _bytes(self, checkpoint: int) -> int:
        """Bytes of a checkpoint's files; 0 for the start of the run."""
        if checkpoint and checkpoint not in self._checkpoint_bytes:
            files = (self._checkpoints / name_of(checkpoint)).rglob("*")
            with contextlib.suppress(FileNotFoundError):  # it was removed just now
                self._checkpoint_bytes[checkpoint] = sum(f.stat().st_size for f in files)
        return self._checkpoint_bytes.get(checkpoint, 0)

    def _file(self, step: int) -> Path:
        return folder_of(self._run_dir, step) / self._share

    def _remove(self, sizes: dict[int, int], step: int) -> None:
        del sizes[step]
        self._file(step).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other shares may be there, or the folder gone
            folder_of(self._run_dir, step).rmdir()


def _in(warned: Mapping[int, int], step: int) -> bool:
    """Return whether a warned step needs the batch of `step`."""
    return any(begin <= step <= end for end, begin in warned.items())


def _say(sentence: str) -> None:
    """Write to standard error, which the run's log contains."""
    print(sentence, file=sys.stderr, flush=True)
