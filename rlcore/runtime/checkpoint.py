"""Run checkpoints: written beside, checksummed, fsynced, renamed; a half-written one is never chosen.

checkpoints/step_000010/learner/         DeepSpeed's sharded state, optimizer, scheduler, RNG
                        buffer/          ledger, payloads, groups in flight
                        controller.json  progress, prompt cursor
                        MANIFEST.json    every file's size and BLAKE2b digest; written last
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlcore.errors import StageError, UserError

MANIFEST = "MANIFEST.json"
PARTS = ("learner/learner.json", "buffer/state.json")  # what no checkpoint of a run is without


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints stay: the `last` newest, every one of a step that `every` divides, and the best one."""

    last: int = 2
    every: int = 0  # steps; 0: none for that reason
    best: str | None = None  # metric whose best value marks one more
    best_is: Literal["max", "min"] = "max"

    def kept(self, folders: list[Path], scores: Mapping[str, float], awaited: int | None) -> set[Path]:
        """Of checkpoints in the order of their steps; damaged ones are to be set aside before (`resume_from`).

        `scores`: value of `best` by evaluated version, for all evaluations so far. `awaited`: version that is being
        evaluated; its checkpoint is held until the score has come.
        """
        keep = set(folders[-self.last :])
        if self.every:
            keep |= {f for f in folders if step_of(f) % self.every == 0}
        if self.best is not None:
            sign = 1 if self.best_is == "max" else -1
            scored = [(sign * scores[v], f) for f in folders if (v := str(step_of(f))) in scores]
            keep |= {max(scored)[1]} if scored else set()  # of equals the newest
            keep |= {f for f in folders if step_of(f) == awaited}
        return keep


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def name_of(step: int) -> str:
    return f"step_{step:06d}"


def begin(root: Path, step: int) -> Path:
    """An empty folder to write into; a leftover of an earlier attempt is removed."""
    folder = root / f".partial-{name_of(step)}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def commit(
    root: Path,
    step: int,
    folder: Path,
    state: dict[str, Any],
    *,
    keep: Retention,
    scores: Mapping[str, float] | None = None,
    awaited: int | None = None,
) -> Path:
    """Seal `folder` as the checkpoint of `step` and drop those that `keep` does not hold. Returns its final path.

    `scores`, `awaited`: see `Retention.kept`. Raises StageError for a folder that a part of the run is missing from.
    """
    missing = [part for part in PARTS if not (folder / part).is_file()]
    if missing:
        raise StageError(f"the checkpoint of step {step} lacks {' and '.join(missing)}")
    (folder / "controller.json").write_text(json.dumps(state, indent=1))
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    listing = {}
    for path in files:
        listing[str(path.relative_to(folder))] = [path.stat().st_size, _digest(path)]
        _fsync(path)
    (folder / MANIFEST).write_text(json.dumps({"step": step, "files": listing}, indent=1))
    for path in [folder / MANIFEST, *{p.parent for p in files}, folder]:
        _fsync(path)
    final = root / name_of(step)
    if final.exists():  # the same step once more, after a resume: the old one stays valid until the rename
        stale = root / f".stale-{name_of(step)}"
        shutil.rmtree(stale, ignore_errors=True)
        final.rename(stale)
        folder.rename(final)
        shutil.rmtree(stale)
    else:
        folder.rename(final)
    _fsync(root)
    folders = _all(root)
    for old in set(folders) - keep.kept(folders, scores or {}, awaited) - {final}:
        shutil.rmtree(old)
    return final


def _all(root: Path) -> list[Path]:
    """Finished checkpoints in the order of their steps."""
    return sorted(root.glob("step_*"), key=step_of)


def problem_with(folder: Path) -> str | None:
    """Why a checkpoint cannot be used, or None if every file is as it was written."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as e:
        return f"its manifest cannot be read ({type(e).__name__})"
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if _digest(path) != digest:
            return f"{name} does not match its checksum"
    return None


def newest_valid(root: Path, note: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose every file is intact; those passed over are named through `note`."""
    for folder in reversed(_all(root)):
        problem = problem_with(folder)
        if problem is None:
            return folder
        note(f"checkpoint {folder.name} is passed over: {problem}")
    return None


def resume_from(root: Path, note: Callable[[str], None]) -> Path | None:
    """The checkpoint that a run goes on from; None if it has written none yet.

    Damaged ones that are newer are renamed to `.damaged-*`, so that they crowd no valid one out. Raises UserError if
    there are checkpoints and none is valid: going on would begin anew and drop what the run has recorded.
    """
    found, folders = newest_valid(root, note), _all(root)
    if found is None and folders:
        raise UserError(
            f"run_dir={root.parent} holds {len(folders)} checkpoints and none is valid ({folders[-1].name}: "
            f"{problem_with(folders[-1])}), so resume=auto has nothing to go on from: restore one of them, or choose "
            "another run_dir to begin anew."
        )
    for damaged in folders[folders.index(found) + 1 :] if found else []:
        aside = root / f".damaged-{damaged.name}"
        shutil.rmtree(aside, ignore_errors=True)
        damaged.rename(aside)
    return found


def state_of(folder: Path) -> dict[str, Any]:
    """The controller's part of a checkpoint."""
    return dict(json.loads((folder / "controller.json").read_text()))


def require(path: str) -> Path:
    """A checkpoint folder named by a user: itself, or the newest valid one of a run directory. Raises UserError."""
    folder = Path(path)
    if (folder / MANIFEST).is_file():
        problem = problem_with(folder)
        if problem:
            raise UserError(f"checkpoint={path} cannot be used: {problem}.")
        return folder
    found = newest_valid(folder / "checkpoints", lambda _: None)
    if found is None:
        raise UserError(f"checkpoint={path} holds no valid checkpoint: give a run directory or one of its checkpoints.")
    return found


def _digest(path: Path) -> str:
    h = hashlib.blake2b(digest_size=16)
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            h.update(block)
    return h.hexdigest()


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
