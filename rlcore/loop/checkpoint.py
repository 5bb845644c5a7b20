"""Run checkpoints: written to a temporary folder, checksummed, fsynced, renamed. An incomplete one
is never selected.

checkpoints/step_000010/learner/         what is trained, optimizer, step count
                        draft/           the same of a co-trained draft, if there is one
                        buffer/          ledger, payloads, groups in flight
                        controller.json  progress, prompt cursor
                        metrics.jsonl    the run's rows so far
                        MANIFEST.json    every file's size and BLAKE2b digest; written last
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from rlcore.errors import StageError, UserError
from rlcore.files import new_folder, replace_file, sync
from rlcore.loop.run_plan import Progress
from rlcore.loop.specs import CheckpointSpec

MANIFEST = "MANIFEST.json"
STATE = "controller.json"
ROWS = "metrics.jsonl"
LEARNER_INDEX = "learner.json"
PINNED = "PINNED"  # in a checkpoint that a process still reads; not part of it
NAME = re.compile(r"step_\d{6,}")
REMOVED = ".removed-"
DAMAGED = ".damaged-"
COLLAPSED = ".collapsed-"
OTHER = ".other-version-"
# Folders left by killed writers and removers, and checkpoints that an earlier start found damaged.
LEFTOVERS = (".step_*.partial", ".step_*.stale", f"{REMOVED}*", f"{DAMAGED}*", f"{COLLAPSED}*")
PARTS = ("learner/learner.json", "buffer/state.json")  # every checkpoint has them


def step_of(folder: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(folder.name.removeprefix("step_"))


def name_of(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"step_{step:06d}"


@contextmanager
def new_checkpoint(root: Path, step: int) -> Iterator[Path]:
    """A folder to fill; it becomes the checkpoint of `step` if the block ends without an error.

    An older one of the same step (after a resume) stays valid until then. Raises StageError if a
    part of the run is missing from it.
    """
    with new_folder(root / name_of(step), replace=True) as folder:
        yield folder
        _seal(folder, step)


def _seal(folder: Path, step: int) -> None:
    """Flush every file and write the manifest."""
    missing = [part for part in PARTS if not (folder / part).is_file()]
    if missing:
        raise StageError(f"the checkpoint of step {step} lacks {' and '.join(missing)}")
    lost = [part for part in _written(folder) if not (folder / part).is_file()]
    if lost:
        raise StageError(
            f"the checkpoint of step {step} lacks {len(lost)} files of learner ranks ({lost[0]}): "
            "each rank writes its own, so run_dir must be one folder for all nodes"
        )
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    listing = {}
    for path in files:
        listing[str(path.relative_to(folder))] = [path.stat().st_size, _digest(path)]
        sync(path)
    for subfolder in {p.parent for p in files}:
        sync(subfolder)
    manifest = json.dumps({"step": step, "files": listing}, indent=1)
    replace_file(folder / MANIFEST, manifest, durable=True)


def _written(folder: Path) -> Iterator[str]:
    """The files that the indices of learner states name."""
    for index in sorted(folder.rglob(LEARNER_INDEX)):
        for name in json.loads(index.read_text()).get("files", ()):
            yield str((index.parent / name).relative_to(folder))


def kept(
    folders: list[Path],
    spec: CheckpointSpec,
    scores: Mapping[str, Mapping[str, float]],
    awaited: int | None,
    alarm: int | None = None,
) -> set[Path]:
    """The checkpoints to keep, in order of step. Damaged ones must have been renamed before
    (`resume_from`).

    `scores`: values of metrics by evaluated version, for all evaluations so far. `awaited`: the
    version that is being evaluated; its checkpoint is kept until its score has come. `alarm`: the
    step of an alarm about the policy; the newest checkpoint of before it is kept.
    """
    keep = set(folders[-spec.keep :]) | {f for f in folders if (f / PINNED).exists()}
    if alarm is not None:
        keep |= set([f for f in folders if step_of(f) < alarm][-1:])
    if spec.keep_every:
        keep |= {f for f in folders if step_of(f) % spec.keep_every == 0}
    if spec.keep_best is not None:
        sign = 1 if spec.best_is == "max" else -1
        of = scores.get(spec.keep_best, {})
        scored = [(sign * of[v], f) for f in folders if (v := str(step_of(f))) in of]
        keep |= {max(scored)[1]} if scored else set()  # among equal scores, the newest
        keep |= {f for f in folders if step_of(f) == awaited}
    return keep


def prune(
    root: Path,
    spec: CheckpointSpec,
    scores: Mapping[str, Mapping[str, float]],
    *,
    newest: Path,
    awaited: int | None,
    alarm: int | None = None,
) -> None:
    """Remove the checkpoints that are not `kept`. `newest`, which was just written, stays.

    Each is renamed first, so that a half removed one never counts as a checkpoint.
    """
    folders = _all(root)
    for old in sorted(set(folders) - kept(folders, spec, scores, awaited, alarm) - {newest}):
        aside = root / f"{REMOVED}{old.name}"
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old.rename(aside))


def sweep(root: Path) -> str:
    """Remove parts of checkpoints that killed writers left, and checkpoints that an earlier start
    found damaged; only for the owner of the run. Returns a sentence about it, or "".

    The names are free when this returns; a thread removes the files.
    """
    for stale in root.glob(".step_*.stale"):  # its writer died between two renames
        whole = root / stale.name.removeprefix(".").removesuffix(".stale")
        if not whole.exists():
            stale.rename(whole)
    leftovers = [f for pattern in LEFTOVERS for f in root.glob(pattern)]
    removed = []
    for number, folder in enumerate(leftovers):
        removed.append(folder.rename(root / f"{REMOVED}{number}-{secrets.token_hex(4)}"))
    if not removed:
        return ""

    def remove() -> None:
        for folder in removed:
            shutil.rmtree(folder, ignore_errors=True)

    threading.Thread(target=remove, name="sweep", daemon=True).start()
    names = ", ".join(sorted(folder.name for folder in leftovers))
    return f"{len(removed)} leftovers of checkpoints are removed: {names}"


def _all(root: Path) -> list[Path]:
    """Finished checkpoints in the order of their steps. Other names are left alone: a user may keep
    a copy next to them."""
    found = (p for p in root.glob("step_*") if NAME.fullmatch(p.name) and p.is_dir())
    return sorted(found, key=step_of)


def newest_name(root: Path) -> str:
    """Name of the newest finished checkpoint, for messages."""
    folders = _all(root)
    return folders[-1].name if folders else "none"


def problem_with(folder: Path) -> str | None:
    """Why a checkpoint cannot be used, or None if every file is as it was written and this version
    can read it."""
    return _damage(folder) or _other_format(folder)


def _damage(folder: Path) -> str | None:
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        listed = {str(name): (int(size), str(digest)) for name, (size, digest) in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        return f"its manifest cannot be read ({type(e).__name__})"
    for part in (*PARTS, STATE):
        if part not in listed:
            return f"its manifest does not list {part}"
    for name, (size, digest) in listed.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if _digest(path) != digest:
            return f"{name} does not match its checksum"
    return None


def _other_format(folder: Path) -> str | None:
    """Return the format of a whole checkpoint that another version of rlcore wrote and this one
    cannot read."""
    try:
        progress = json.loads((folder / STATE).read_text())["progress"]
        unknown = sorted({*progress} - {f.name for f in fields(Progress)})
        Progress(**{k: v for k, v in progress.items() if k not in unknown})
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        return f"{STATE} is of another format ({type(e).__name__})"
    if unknown:
        return f"{STATE} is of another version of rlcore: its progress has {', '.join(unknown)}"
    for index in sorted(folder.rglob(LEARNER_INDEX)):
        name = index.relative_to(folder)
        try:
            state = json.loads(index.read_text())
            parts = [state.get("files", {}), state.get("shapes", {})]
        except (ValueError, AttributeError) as e:
            return f"{name} is of another format ({type(e).__name__})"
        # An index of this version names no format, one of a later version does.
        if "format" in state or not all(isinstance(part, dict) for part in parts):
            return f"{name} is of another format than this version of rlcore reads"
    return None


def newest_valid(root: Path, note: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that can be used; skipped ones are reported through `note`."""
    return _newest(root, note)[0]


def _newest(root: Path, note: Callable[[str], None]) -> tuple[Path | None, dict[Path, str]]:
    """The newest valid checkpoint, and the newer ones with the names to which they are renamed."""
    aside: dict[Path, str] = {}
    for folder in reversed(_all(root)):
        damage = _damage(folder)
        problem = damage or _other_format(folder)
        if problem is None:
            return folder, aside
        aside[folder] = f"{DAMAGED if damage else OTHER}{folder.name}"
        note(f"checkpoint {folder.name} is passed over: {problem}")
    return None, aside


def resume_from(root: Path, note: Callable[[str], None]) -> Path | None:
    """The checkpoint that a run continues from; None if it has written none yet.

    Newer ones that cannot be used are renamed to `.damaged-*`. Checkpoints of another version of
    rlcore are renamed to `.other-version-*`, so that they do not count as checkpoints; the next
    start removes the damaged ones. Raises UserError if there are checkpoints and none can be used:
    continuing would start from the beginning and discard the run's records.
    """
    found, aside = _newest(root, note)
    if found is None and aside:
        newest = max(aside, key=step_of)
        raise UserError(
            f"run_dir={root.parent} holds {len(aside)} checkpoints and none is valid "
            f"({newest.name}: {problem_with(newest)}), so resume=auto cannot "
            "continue: restore one of them, or choose another run_dir to start from the beginning."
        )
    for folder, name in aside.items():
        shutil.rmtree(root / name, ignore_errors=True)
        folder.rename(root / name)
    return found


def set_aside(root: Path, alarm: int) -> Path | None:
    """Rename the checkpoints from an alarm on, so that they do not count; the next start removes
    them. Returns the newest of those before, if there is one."""
    left = None
    for folder in _all(root):
        if step_of(folder) < alarm:
            left = folder
        else:
            aside = root / f"{COLLAPSED}{folder.name}"
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
    return left


def state_of(folder: Path) -> dict[str, Any]:
    """The loop's own part of a checkpoint."""
    return dict(json.loads((folder / STATE).read_text()))


def require(path: str) -> Path:
    """A checkpoint folder named by a user: itself, or the newest valid one of a run directory.
    Raises UserError."""
    folder = Path(path)
    if (folder / MANIFEST).is_file():
        problem = problem_with(folder)
        if problem:
            raise UserError(f"checkpoint={path} cannot be used: {problem}. Give another one.")
        return folder
    found = newest_valid(folder / "checkpoints", lambda _: None)
    if found is None:
        raise UserError(
            f"checkpoint={path} holds no valid checkpoint: give a run directory or one of its "
            "checkpoints."
        )
    return found


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
