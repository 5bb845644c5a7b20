"""Readers of a run directory for display; the run may still be going on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlcore.errors import UserError
from rlcore.metrics.health import RunVerdict
from rlcore.metrics.logger import read_timeline
from rlcore.metrics.names import combine, declared
from rlcore.metrics.rows import Row, run_rows

MAX_POINTS = 1000  # points a curve at most
MAX_SAMPLES = 64  # of one step, or one evaluation
MAX_EVALUATED = 12  # of the newest evaluation, among the samples of training
MAX_STEPS = 20  # newest steps whose samples are shown


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The answers of the first and the newest evaluation of one task and mode. Example:
    Evaluated("digits_greedy", 0, 150, [...], [...])"""

    label: str
    first: int  # the version that was evaluated
    last: int
    before: list[dict[str, Any]]
    after: list[dict[str, Any]]


@dataclass(slots=True)
class Run:
    """One run. Example: Run("a", Path("runs/a"), rows, "seed: 0")"""

    name: str
    folder: Path
    rows: list[Row]
    config: str
    samples: list[dict[str, Any]] = field(default_factory=list)  # with "kind", "source" and "at"
    answers: list[Evaluated] = field(default_factory=list)  # of what was evaluated twice
    verdict: RunVerdict | None = None  # None: not judged
    about: dict[str, Any] = field(default_factory=dict)  # machine, commit, versions
    status: dict[str, Any] = field(default_factory=dict)  # what it did when that was written
    timeline: list[dict[str, Any]] = field(default_factory=list)  # of the last steps

    @property
    def settings(self) -> dict[str, Any]:
        """config.yaml as nested mappings; empty where it is none that can be read."""
        try:
            found = yaml.safe_load(self.config)
        except yaml.YAMLError:
            return {}
        return found if isinstance(found, dict) else {}


# A function that gives the verdict on the run in a folder, by its rows.
Judge = Callable[[Path, Sequence[Row]], RunVerdict]


def read_run(folder: Path, judge: Judge | None = None) -> Run:
    """The contents of a run directory for a report. Raises UserError if it is not a run
    directory."""
    require_run(folder)
    config = folder / "config.yaml"
    rows = run_rows(folder)
    return Run(
        name=folder.resolve().name,
        folder=folder,
        rows=rows,
        config=config.read_text(encoding="utf-8") if config.exists() else "",
        samples=_samples(folder / "samples"),
        answers=_answers(folder / "samples"),
        verdict=judge(folder, rows) if judge is not None else None,
        about=_object(folder / "about.json"),
        status=_object(folder / "status.json"),
        timeline=read_timeline(folder / "timeline.jsonl"),
    )


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("metrics.jsonl", "config.yaml"))


def run_folders(folders: Sequence[str | Path]) -> list[Path]:
    """Run directories, in the place of a folder that holds runs or sweeps the begun runs by
    name."""
    return [run for folder in map(Path, folders) for run in _within(folder, 2) or [folder]]


def _within(folder: Path, levels: int) -> list[Path]:
    if _is_run(folder):
        return [folder]
    inner = sorted(folder.iterdir()) if levels and folder.is_dir() else []
    return [run for path in inner for run in _within(path, levels - 1)]


def require_run(folder: Path) -> None:
    """Raise UserError for a folder that holds no run."""
    if not _is_run(folder):
        runs = [str(run) for run in _within(Path("runs"), 2)]
        known = f"; runs/ holds {', '.join(runs[:8])}{', ...' if runs[8:] else ''}"
        raise UserError(
            f"{folder} is not a run directory: it holds neither metrics.jsonl nor config.yaml"
            f"{known if runs else ''}."
        )


def thin(rows: list[Row], stride: int) -> list[Row]:
    """Combine each `stride` neighbouring rows, metrics by their declared reductions, other entries
    by their last values."""
    if stride <= 1:
        return rows
    return [_as_one(rows[i : i + stride]) for i in range(0, len(rows), stride)]


def _as_one(rows: list[Row]) -> Row:
    others = {k: v for row in rows for k, v in row.items() if declared(k) is None}
    known = [{k: v for k, v in row.items() if declared(k) is not None} for row in rows]
    return {**others, **combine(known)}


def _samples(folder: Path) -> list[dict[str, Any]]:
    """Samples of the newest training steps and of the newest step of each evaluation."""
    found = []
    # Names sort by step.
    for file in sorted(folder.glob("step_*.jsonl"))[-MAX_STEPS:]:
        at = int(file.stem.removeprefix("step_"))
        place = {"kind": "training", "source": f"step {at}", "at": at}
        found += [{**record, **place} for record in records(file)[:MAX_SAMPLES]]
    for label, files in _evaluations(folder).items():
        at = _version(files[-1])
        place = {"kind": f"evaluation {label}", "source": f"version {at}", "at": at}
        found += [{**record, **place} for record in records(files[-1])[:MAX_EVALUATED]]
    return found


def _answers(folder: Path) -> list[Evaluated]:
    evaluated = _evaluations(folder).items()
    ends = [(label, files[0], files[-1]) for label, files in evaluated if len(files) > 1]
    return [
        Evaluated(
            label,
            _version(first),
            _version(last),
            records(first)[:MAX_SAMPLES],
            records(last)[:MAX_SAMPLES],
        )
        for label, first, last in ends
    ]


def _evaluations(folder: Path) -> dict[str, list[Path]]:
    """Files eval_<version>_<task>_<mode>.jsonl, oldest first, by task and mode."""
    found: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("eval_*.jsonl")):
        found.setdefault(file.stem.split("_", 2)[-1], []).append(file)
    return found


def _version(file: Path) -> int:
    return int(file.stem.split("_")[1])


def _object(file: Path) -> dict[str, Any]:
    """A JSON object that a report does not require: empty where it is missing or broken."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def records(file: Path) -> list[dict[str, Any]]:
    """The decoded trajectories of one file of samples/."""
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    return [json.loads(line) for line in lines if line.strip()]
