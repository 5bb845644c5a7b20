"""Run checkpoints: written to a temporary folder, checksummed, fsynced, renamed. An incomplete one
is never selected.

checkpoints/step_000010/learner/         what is trained, optimizer, step count
                        draft/           the same of a co-trained draft, if there is one
                        buffer/          ledger, payloads, groups in flight
                        controller.json  progress, prompt cursor
                        MANIFEST.json    every file's size and BLAKE2b digest; written last
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlcore.errors import StageError, UserError
from rlcore.files import new_folder, replace_file, sync
from rlcore.loop.specs import CheckpointSpec

MANIFEST = "MANIFEST.json"
STATE = "controller.json"
LEARNER_INDEX = "learner.json"
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
) -> set[Path]:
    """The checkpoints to keep, in order of step. Damaged ones must have been renamed before
    (`resume_from`).

    `scores`: values of metrics by evaluated version, for all evaluations so far. `awaited`: the
    version that is being evaluated; its checkpoint is kept until its score has come.
    """
    keep = set(folders[-spec.keep :])
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
) -> None:
    """Remove the checkpoints that are not `kept`. `newest`, which was just written, stays."""
    folders = _all(root)
    for old in set(folders) - kept(folders, spec, scores, awaited) - {newest}:
        shutil.rmtree(old)


def _all(root: Path) -> list[Path]:
    """Finished checkpoints in the order of their steps."""
    return sorted(root.glob("step_*"), key=step_of)


def newest_name(root: Path) -> str:
    """Name of the newest finished checkpoint, for messages."""
    folders = _all(root)
    return folders[-1].name if folders else "none"


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
    """The newest checkpoint whose every file is intact; skipped ones are reported through
    `note`."""
    for folder in reversed(_all(root)):
        problem = problem_with(folder)
        if problem is None:
            return folder
        note(f"checkpoint {folder.name} is passed over: {problem}")
    return None


def resume_from(root: Path, note: Callable[[str], None]) -> Path | None:
    """The checkpoint that a run continues from; None if it has written none yet.

    Damaged ones that are newer are renamed to `.damaged-*`, so that they do not count as
    checkpoints. Raises UserError if there are checkpoints and none is valid: continuing would start
    from the beginning and discard the run's records.
    """
    found, folders = newest_valid(root, note), _all(root)
    if found is None and folders:
        raise UserError(
            f"run_dir={root.parent} holds {len(folders)} checkpoints and none is valid "
            f"({folders[-1].name}: {problem_with(folders[-1])}), so resume=auto cannot "
            "continue: restore one of them, or choose another run_dir to start from the beginning."
        )
    for damaged in folders[folders.index(found) + 1 :] if found else []:
        aside = root / f".damaged-{damaged.name}"
        shutil.rmtree(aside, ignore_errors=True)
        damaged.rename(aside)
    return found


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
            raise UserError(f"checkpoint={path} cannot be used: {problem}.")
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
