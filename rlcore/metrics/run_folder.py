"""What a run directory holds, read for display; the run may still be going on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcore.errors import UserError
from rlcore.metrics.names import combine, declared
from rlcore.metrics.rows import Row, read_rows

MAX_POINTS = 1000  # points a curve; longer runs are thinned by each metric's own reduction
MAX_SAMPLES = 12


@dataclass(slots=True)
class Run:
    """One run. Example: Run("a", Path("runs/a"), rows, "seed: 0")"""

    name: str
    folder: Path
    rows: list[Row]
    config: str
    # (file name, records)
    samples: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)
    # None: not judged
    warnings: list[str] | None = None


# Warnings about the run in a folder, by its rows.
Judge = Callable[[Path, Sequence[Row]], list[str]]


def read_run(folder: Path, judge: Judge | None = None) -> Run:
    """Everything a report shows of a run directory. Raises UserError if it is none."""
    require_run(folder)
    config = folder / "config.yaml"
    rows = read_rows(folder / "metrics.jsonl")
    return Run(
        name=folder.resolve().name,
        folder=folder,
        rows=thin(rows),
        config=config.read_text(encoding="utf-8") if config.exists() else "",
        samples=_samples(folder / "samples"),
        warnings=judge(folder, rows) if judge is not None else None,
    )


def require_run(folder: Path) -> None:
    """Raise UserError for a folder that holds no run."""
    if not any((folder / name).exists() for name in ("metrics.jsonl", "config.yaml")):
        raise UserError(
            f"{folder} is not a run directory: it holds neither metrics.jsonl nor config.yaml."
        )


def thin(rows: list[Row], points: int = MAX_POINTS) -> list[Row]:
    """At most `points` rows: neighbours become one, each metric by its declared reduction, others
    by their last value."""
    size = -(-len(rows) // points)
    if size <= 1:
        return rows
    return [_as_one(rows[i : i + size]) for i in range(0, len(rows), size)]


def _as_one(rows: list[Row]) -> Row:
    others = {k: v for row in rows for k, v in row.items() if declared(k) is None}
    known = [{k: v for k, v in row.items() if declared(k) is not None} for row in rows]
    return {**others, **combine(known)}


def _samples(folder: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    """The newest training samples and the newest of each evaluation."""
    newest: dict[str, Path] = {}
    # Names sort by step, so the last one of a kind is the newest.
    for file in sorted(folder.glob("*.jsonl")):
        kind, _, rest = file.stem.partition("_")
        newest[f"{kind} {rest.partition('_')[2]}"] = file
    return [(f.stem, records(f)[:MAX_SAMPLES]) for f in newest.values()]


def records(file: Path) -> list[dict[str, Any]]:
    """The decoded trajectories of one file of samples/."""
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    return [json.loads(line) for line in lines if line.strip()]
