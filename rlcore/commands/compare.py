"""`rlcore compare`: where two runs' configurations differ, and their final metrics side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlcore.commands.owner import own
from rlcore.commands.watch import judged
from rlcore.config.compose import load, recorded
from rlcore.errors import UserError
from rlcore.metrics.digest import Digest, Figure
from rlcore.metrics.report import write_report
from rlcore.metrics.rows import Row, read_rows
from rlcore.metrics.run_folder import require_run


def report(run_dirs: Sequence[str], out: str | None) -> int:
    """Write the report and print where it is. Raises UserError for a folder that holds no run."""
    if not run_dirs:
        raise UserError("rlcore report needs at least one run directory.")
    with _owned(run_dirs, out):
        print(write_report(run_dirs, out, _judge))
    return 0


def _owned(run_dirs: Sequence[str], out: str | None) -> AbstractContextManager[object]:
    """Own the run that the report is written into, if it is written into one."""
    target = Path(out).parent if out else Path(run_dirs[0]) if len(run_dirs) == 1 else Path()
    if not any(target.resolve() == Path(folder).resolve() for folder in run_dirs):
        return nullcontext()
    require_run(target)
    return own(target, "rlcore report", instead="name another file with out=FILE")


def _judge(folder: Path, rows: Sequence[Row]) -> list[str]:
    """A run's warnings by its own bounds. The report is of use without them, so that a run without
    a configuration, or with one that this version refuses, is said to be not judged."""
    if not (folder / "config.yaml").is_file():
        return ["not judged, since the folder holds no config.yaml"]
    try:
        config = load([f"run_dir={folder}", "resume=auto"])
    except UserError as e:
        return [f"not judged: {e}"]
    return judged(config, rows)


ABSENT = object()


def compare(first: str, second: str, *, as_json: bool, console: Console | None = None) -> int:
    """Print the differences. Raises UserError for a folder that holds no run."""
    folders = (Path(first), Path(second))
    for folder in folders:
        require_run(folder)
    configs = [recorded(folder) for folder in folders]
    rows = [read_rows(folder / "metrics.jsonl") for folder in folders]
    changed = differences(*configs)
    figures = side_by_side(*rows)
    if as_json:
        print(json.dumps(_plain((first, second), changed, figures), indent=1))
        return 0
    console = console or Console()
    names = _names(*folders)
    console.print(_settings(names, changed))
    console.print()
    console.print(_metrics(names, figures))
    return 0


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ, in the order of the first configuration; ABSENT where a run has no
    such key. `run_dir` always differs and is left out."""
    keys = dict.fromkeys([*first, *second])
    pairs = {key: (first.get(key, ABSENT), second.get(key, ABSENT)) for key in keys}
    return {key: (a, b) for key, (a, b) in pairs.items() if a != b and key != "run_dir"}


def side_by_side(
    first: list[Row], second: list[Row]
) -> dict[str, tuple[Figure | None, Figure | None]]:
    """The figures of the summaries at the end of both runs, by name; None where a run lacks one."""
    ends = [{figure.name: figure for figure in _figures(rows)} for rows in (first, second)]
    names = dict.fromkeys([*ends[0], *ends[1]])
    return {name: (ends[0].get(name), ends[1].get(name)) for name in names}


def _figures(rows: list[Row]) -> list[Figure]:
    digest = Digest()
    for row in rows:
        digest.add(row)
    end = digest.row or {}
    totals = (("steps", "step"), ("seconds", "time/total_s"))
    return [*digest.figures(), *(Figure(name, end[key]) for name, key in totals if key in end)]


def _plain(
    names: tuple[str, str],
    changed: Mapping[str, tuple[Any, Any]],
    figures: Mapping[str, tuple[Figure | None, Figure | None]],
) -> dict[str, Any]:
    """The comparison for JSON; a value that a run does not have is left out."""
    settings = [
        {"key": key} | {run: v for run, v in zip("ab", pair) if v is not ABSENT}
        for key, pair in changed.items()
    ]
    metrics = [
        {"name": name} | {run: f.last for run, f in zip("ab", pair) if f is not None}
        for name, pair in figures.items()
    ]
    return {"a": names[0], "b": names[1], "config": settings, "metrics": metrics}


def _names(first: Path, second: Path) -> tuple[str, str]:
    """The folders' own names, which are shorter than their paths, where they differ."""
    names = (first.resolve().name, second.resolve().name)
    return names if names[0] != names[1] else (str(first), str(second))


def _settings(names: tuple[str, str], changed: Mapping[str, tuple[Any, Any]]) -> Table | str:
    if not changed:
        return "The configurations are the same."
    table = _table("configuration", names)
    for key, pair in changed.items():
        table.add_row(escape(key), *(escape(_shown(value)) for value in pair))
    return table


def _metrics(
    names: tuple[str, str], figures: Mapping[str, tuple[Figure | None, Figure | None]]
) -> Table | str:
    if not figures:
        return "Neither run has finished a learner step."
    table = _table("final metrics", names)
    for name, pair in figures.items():
        mean = ", mean of the last steps" if any(f is not None and f.recent for f in pair) else ""
        table.add_row(escape(name + mean), *(f.shown if f is not None else "" for f in pair))
    return table


def _table(title: str, names: tuple[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False)
    for heading in ("", *names):
        table.add_column(escape(heading), overflow="fold")  # cut values would look equal
    return table


def _shown(value: Any) -> str:
    """A value as one would write it in YAML."""
    if value is ABSENT:
        return "(no such key)"
    return value if isinstance(value, str) else json.dumps(value)
