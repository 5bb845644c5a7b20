"""`rlcore compare`: where two configurations differ, and the final metrics of their runs side by
side; `rlcore report`: one page of several runs, or figures of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlcore.commands.derived import health_of
from rlcore.commands.owner import own
from rlcore.config.compose import load, recorded
from rlcore.errors import UserError
from rlcore.metrics.console import wide_console
from rlcore.metrics.digest import Digest, Figure, number
from rlcore.metrics.health import RunVerdict
from rlcore.metrics.intervals import (
    Interval,
    share_difference,
    share_interval,
    t_interval,
    welch,
)
from rlcore.metrics.rows import Row
from rlcore.metrics.run_folder import Run, read_run, require_run, run_folders
from rlcore.report.curves import Asked, write_curves
from rlcore.report.page import families, write_report


def report(
    run_dirs: Sequence[str], out: str | None, curves: tuple[str, Asked] | None = None
) -> int:
    """Write the report, or with `curves` the figures asked for, and print where it is; a sweep's
    folder stands for its runs. Raises UserError for a folder that holds no run."""
    if not run_dirs:
        raise UserError("rlcore report needs at least one run directory.")
    run_dirs = [str(folder) for folder in run_folders(run_dirs)]
    if curves is not None:
        print(write_curves(run_dirs, *curves, out))
        return 0
    with _owned(run_dirs, out):
        print(write_report(run_dirs, out, _judge))
    return 0


def _owned(run_dirs: Sequence[str], out: str | None) -> AbstractContextManager[object]:
    """A context in which this command owns the run that the report is written into, if any."""
    target = Path(out).parent if out else Path(run_dirs[0]) if len(run_dirs) == 1 else Path()
    if not any(target.resolve() == Path(folder).resolve() for folder in run_dirs):
        return nullcontext()
    require_run(target)
    return own(target, "rlcore report", instead="name another file with out=FILE")


def _judge(folder: Path, rows: Sequence[Row]) -> RunVerdict:
    """A run's verdict by its own bounds. The report is useful without one, so a run without a
    configuration, or with one that this version refuses, is marked as not judged."""
    steps = f"{len(rows)} steps, not judged"
    if not (folder / "config.yaml").is_file():
        return RunVerdict("unsure", f"{steps}, since the folder holds no config.yaml")
    try:
        config = load([f"run_dir={folder}", "resume=auto"])
    except UserError as e:
        return RunVerdict("unsure", f"{steps}: {e}")
    health = health_of(config)
    health.resume(rows)
    return health.verdict()


ABSENT = object()


@dataclass(frozen=True, slots=True)
class Arm:
    """One configuration: its runs differ by their seed alone. Example: Arm("a", (Run(...),))"""

    name: str
    runs: tuple[Run, ...]

    @property
    def folder(self) -> Path:
        """The folder of its first run, whose configuration is used."""
        return self.runs[0].folder


@dataclass(frozen=True, slots=True)
class Compared:
    """A metric at the end of both; None where one lacks it. `difference`: second less first."""

    figures: tuple[Figure | None, Figure | None]
    intervals: tuple[Interval | None, Interval | None]
    difference: Interval | None


def compare(
    run_dirs: Sequence[str], *, ci: float = 95, as_json: bool, console: Console | None = None
) -> int:
    """Print the differences of two runs, or of two configurations with several seeds each, whose
    means have intervals of `ci` percent.

    Raises UserError for a folder that holds no run, and for more or fewer configurations than two.
    """
    arms = _arms(run_dirs)
    changed = differences(*(recorded(arm.folder) for arm in arms))
    if max(len(arm.runs) for arm in arms) > 1:
        changed.pop("seed", None)
    compared, warnings = figures_of(*arms, ci), unlike(*arms)
    if as_json:
        print(json.dumps(_plain(arms, changed, compared, warnings), indent=1))
        return 0
    console = console or wide_console()
    console.print(_settings(_names(*arms), changed))
    console.print()
    console.print(_metrics(arms, compared, ci))
    for sentence in warnings:
        console.print(f"\nWarning: {sentence}", style="yellow", markup=False, highlight=False)
    return 0


def _arms(run_dirs: Sequence[str]) -> tuple[Arm, Arm]:
    runs = [read_run(folder) for folder in run_folders(run_dirs)]
    if len(runs) == 1:
        raise UserError(
            f"rlcore compare takes two runs or a sweep's folder, and {runs[0].folder} is one run: "
            "name the run to compare it with, too."
        )
    if len(runs) == 2:  # whatever they differ by
        first, second = (Arm(run.name, (run,)) for run in runs)
        return first, second
    found = [Arm(family.name, tuple(family.runs)) for family in families(runs, 1)]
    if len(found) != 2:
        raise UserError(
            "rlcore compare takes two runs, or the seeds of two configurations: these "
            f"{len(runs)} runs are of {len(found)} ({', '.join(arm.name for arm in found)}); "
            "rlcore report takes any number."
        )
    return found[0], found[1]


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ, in the order of the first configuration; ABSENT where a run has no
    such key. `run_dir` always differs and is left out."""
    keys = dict.fromkeys([*first, *second])
    pairs = {key: (first.get(key, ABSENT), second.get(key, ABSENT)) for key in keys}
    return {key: (a, b) for key, (a, b) in pairs.items() if a != b and key != "run_dir"}


def figures_of(first: Arm, second: Arm, ci: float) -> dict[str, Compared]:
    """The figures of the summaries at the end of both, by name: of the first run of each, and the
    means over its runs."""
    ends = [
        [{f.name: f for f in _figures(run.rows)} for run in arm.runs] for arm in (first, second)
    ]
    names = dict.fromkeys(name for arm in ends for run in arm for name in run)
    found = {}
    for name in names:
        its = [[figure for run in arm if (figure := run.get(name)) is not None] for arm in ends]
        found[name] = Compared((_first(its[0]), _first(its[1])), *_intervals(its, ci))
    return found


def _first(figures: Sequence[Figure]) -> Figure | None:
    return figures[0] if figures else None


def _intervals(
    its: Sequence[Sequence[Figure]], ci: float
) -> tuple[tuple[Interval | None, Interval | None], Interval | None]:
    """Of both means, and of their difference: over seeds, and of shares at least of their
    answers."""
    known = [[f for f in figures if f.last is not None] for figures in its]
    values = [[float(f.last or 0.0) for f in figures] for figures in known]
    sizes = [[f.size for f in figures] for figures in known]
    if any(f.share for figures in known for f in figures):
        one, other = (share_interval(v, n, ci) if v else None for v, n in zip(values, sizes))
        pairs = list(zip(values, sizes))
        return (one, other), share_difference(pairs[0], pairs[1], ci) if all(values) else None
    one, other = (t_interval(v, ci) if v else None for v in values)
    return (one, other), welch(values[0], values[1], ci) if all(values) else None


# Metrics that should be equal in a comparison of methods, with the least difference that is not
# noise; it must also be a tenth of the larger.
ALIKE = {
    "staleness/mean": ("staleness", "steps", 0.1),
    "response_length/mean": ("response length", "tokens", 1.0),
}


def unlike(first: Arm, second: Arm) -> list[str]:
    """A sentence on realised staleness and on length where they differ by more than a tenth, by
    their means over all steps of all runs."""
    found = []
    for metric, (name, unit, least) in ALIKE.items():
        values = [
            [v for run in arm.runs for row in run.rows if (v := row.get(metric)) is not None]
            for arm in (first, second)
        ]
        if not all(values):
            continue
        a, b = (sum(v) / len(v) for v in values)
        if abs(a - b) <= max(least, 0.1 * max(abs(a), abs(b))):
            continue
        advice = (
            "schedule=fixed_lag makes it the same"
            if metric == "staleness/mean"
            else "compare over tokens as well: rlcore report DIR DIR format=svg x=tokens"
        )
        found.append(
            f"the {name} was not the same, {number(a)} and {number(b)} {unit} in the mean over all "
            f"steps: it may be what the results differ by ({advice})."
        )
    return found


def _figures(rows: list[Row]) -> list[Figure]:
    digest = Digest()
    for row in rows:
        digest.add(row)
    end = digest.row or {}
    totals = (("steps", "step"), ("seconds", "time/total_s"))
    return [*digest.figures(), *(Figure(name, end[key]) for name, key in totals if key in end)]


def _plain(
    arms: tuple[Arm, Arm],
    changed: Mapping[str, tuple[Any, Any]],
    compared: Mapping[str, Compared],
    warnings: Sequence[str],
) -> dict[str, Any]:
    """The comparison for JSON; values that a run lacks are left out. With several seeds,
    `a` and `b` are means."""
    settings = [
        {"key": key} | {run: v for run, v in zip("ab", pair) if v is not ABSENT}
        for key, pair in changed.items()
    ]
    metrics = []
    for name, found in compared.items():
        line: dict[str, Any] = {"name": name}
        for run, figure, interval in zip("ab", found.figures, found.intervals):
            if figure is not None:
                line[run] = figure.last if interval is None or interval.n < 2 else interval.mean
            if interval is not None and interval.low is not None:
                line[f"{run}_interval"] = [interval.low, interval.high]
        if (difference := found.difference) is not None and difference.low is not None:
            line |= {
                "difference": difference.mean,
                "difference_interval": [difference.low, difference.high],
            }
        metrics.append(line)
    runs = {run: [str(r.folder) for r in arm.runs] for run, arm in zip("ab", arms)}
    named = {run: folders[0] if len(folders) == 1 else folders for run, folders in runs.items()}
    return {**named, "config": settings, "metrics": metrics, "warnings": list(warnings)}


def _names(first: Arm, second: Arm) -> tuple[str, str]:
    """The names of the folders instead of their paths, where the names differ."""
    if first.name != second.name:
        return first.name, second.name
    return str(first.folder), str(second.folder)


def _settings(names: tuple[str, str], changed: Mapping[str, tuple[Any, Any]]) -> Table | str:
    if not changed:
        return "The configurations are the same."
    table = _table("configuration", names)
    for key, pair in changed.items():
        table.add_row(escape(key), *(escape(_shown(value)) for value in pair))
    return table


def _metrics(arms: tuple[Arm, Arm], compared: Mapping[str, Compared], ci: float) -> Table | str:
    if not compared:
        return "Neither run has finished a learner step."
    several = max(len(arm.runs) for arm in arms) > 1
    known = any(its.difference and its.difference.low is not None for its in compared.values())
    title = "final metrics" + (": means over seeds" if several else "")
    title += f", with intervals of {ci:g} %" if several or known else ""
    table = _table(title, _names(*arms))
    if several or known:
        table.add_column("difference, low to high")
    for name, its in compared.items():
        recent = any(f is not None and f.recent for f in its.figures)
        cells = [_cell(figure, interval) for figure, interval in zip(its.figures, its.intervals)]
        heading = escape(name + (", mean of the last steps" if recent else ""))
        difference = [_difference(its.difference)] if several or known else []
        table.add_row(heading, *cells, *difference)
    return table


def _cell(figure: Figure | None, interval: Interval | None) -> str:
    if figure is None or interval is None or interval.half is None:
        return figure.shown if figure is not None else ""
    if figure.share:
        runs = f" ({interval.n})" if interval.n > 1 else ""
        return f"{number(interval.mean)}, {number(interval.low)} to {number(interval.high)}{runs}"
    return f"{number(interval.mean)} ± {number(interval.half)} ({interval.n})"


def _difference(found: Interval | None) -> str:
    if found is None:
        return ""
    if found.low is None:
        return number(found.mean)
    return f"{number(found.mean)}, {number(found.low)} to {number(found.high)}"


def _table(title: str, names: tuple[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False)
    for heading in ("", *names):
        table.add_column(escape(heading), overflow="fold")  # cut values would look equal
    return table


def _shown(value: Any) -> str:
    """A value in YAML."""
    if value is ABSENT:
        return "(no such key)"
    return value if isinstance(value, str) else json.dumps(value)
