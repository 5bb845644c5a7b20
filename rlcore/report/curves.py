"""Figures for a paper: curves of several configurations, seeds merged, as CSV, SVG or PDF."""

from __future__ import annotations

import bisect
import csv
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlcore.errors import UserError
from rlcore.files import replace_file
from rlcore.metrics.intervals import Interval, share_interval, t_interval
from rlcore.metrics.names import declared, is_accuracy, size_of
from rlcore.metrics.rows import Row
from rlcore.metrics.run_folder import read_run
from rlcore.report.figures import Family
from rlcore.report.page import distinct, families

# Metrics drawn by default, if the runs have them.
USUAL = ("reward/mean", "staleness/mean", "mismatch/kl_k3")
GRID = 200  # points of curves whose runs share no x
Points = list[tuple[float, float]]  # of one run, in the order of its steps


@dataclass(frozen=True, slots=True)
class Point:
    """The runs of one configuration at one x. Example: Point(20, Interval(0.8, 0.7, 0.9, 3))"""

    x: float
    y: Interval


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of one configuration."""

    arm: str
    metric: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Asked:
    """The curves to draw. `x`: step, seconds, tokens, or a metric; `y`: metrics, empty: the usual
    ones; `labels`: of the configurations in the order of their first run, empty: folders' names.
    Of pictures alone: `ylabel`, words for the metrics; `width_mm`, 0: 86 a panel; `smooth`, points
    of the running mean of what is drawn."""

    x: str = "step"
    y: tuple[str, ...] = ()
    ci: float = 95
    labels: tuple[str, ...] = ()
    ylabel: tuple[str, ...] = ()
    width_mm: int = 0
    smooth: int = 1


def write_curves(run_dirs: Sequence[str], form: str, asked: Asked, out: str | None = None) -> Path:
    """Write the curves of runs to `out` (default: curves.FORMAT in the working directory).

    Raises UserError for a folder without a run, an unknown metric, labels that do not fit, and
    where matplotlib is missing for svg and pdf.
    """
    runs = distinct([read_run(Path(folder)) for folder in run_dirs])
    drawn = curves(families(runs, 1), asked)
    target = Path(out or f"curves.{form}")
    if form == "csv":
        replace_file(target, as_csv(drawn, asked))
    else:
        _draw(drawn, asked, target, form)
    return target


def curves(arms: Sequence[Family], asked: Asked) -> list[Curve]:
    """The curves of every metric asked for, of every configuration that has it."""
    known = sorted({name for arm in arms for run in arm.runs for row in run.rows for name in row})
    if asked.labels and len(asked.labels) != len(arms):
        raise UserError(
            f"labels={','.join(asked.labels)} names {len(asked.labels)} configurations, and the "
            f"runs are of {len(arms)}: {', '.join(arm.name for arm in arms)}."
        )
    usual = [n for n in known if is_accuracy(n)] + [n for n in USUAL if n in known]
    for key, names in (("y", asked.y), ("x", () if asked.x in AXES else (asked.x,))):
        for name in names:
            if name not in known:
                raise _unknown(key, name, known)
    labels = asked.labels or tuple(arm.name for arm in arms)
    found = []
    for name, (label, arm) in itertools.product(asked.y or usual, zip(labels, arms)):
        its = [run for run in arm.runs if run_points(run.rows, name, asked.x)]
        if its:
            points, sizes = (
                [run_points(run.rows, n, asked.x) for run in its] for n in (name, size_of(name))
            )
            shares = sizes if is_accuracy(name) else None
            found.append(Curve(label, name, merge(points, asked.ci, shares)))
    if not found:
        raise UserError("the runs have no values to draw: wait until one has finished a step.")
    return found


def _unknown(key: str, name: str, known: Sequence[str]) -> UserError:
    import difflib

    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    said = f"perhaps {' or '.join(near)} is meant; " if near else ""
    further = f"{', '.join(AXES)}, and every metric" if key == "x" else "the metrics"
    return UserError(
        f"{key}={name} is not a metric of these runs: {said}{further} of metrics.jsonl can be "
        "drawn."
    )


# ---- x -------------------------------------------------------------------------------------------


def _seconds(rows: Sequence[Row]) -> list[float | None]:
    return [row.get("time/total_s") for row in rows]


def _tokens(rows: Sequence[Row]) -> list[float | None]:
    """Tokens trained on so far."""
    return list(itertools.accumulate(float(row.get("train/tokens") or 0.0) for row in rows))


def _steps(rows: Sequence[Row]) -> list[float | None]:
    return [row["step"] for row in rows]


AXES: Mapping[str, Callable[[Sequence[Row]], list[float | None]]] = {
    "step": _steps,
    "seconds": _seconds,
    "tokens": _tokens,
}
TITLES = {
    "step": "optimizer step",
    "seconds": "time [s]",
    "tokens": "tokens trained on",
    "reward/mean": "mean reward",
    "staleness/mean": "mean staleness [steps]",
    "response_length/mean": "answer length [tokens]",
    "mismatch/kl_k3": "KL(p_inf || p_ref), k3 [nats]",
    "mismatch/ess": "effective sample size [share]",
    "entropy": "entropy [nats]",
}
ACCURACY = {"greedy": "accuracy, greedy", "mean": "mean accuracy", "majority": "majority accuracy"}


def run_points(rows: Sequence[Row], metric: str, x: str) -> Points:
    """The values of a metric over x, by step. An evaluation is placed at the step whose weights
    were evaluated, which `eval/policy_version` says; at the start nothing is spent."""
    made = AXES[x](rows) if x in AXES else [row.get(x) for row in rows]
    at = {int(row["step"] or 0): value for row, value in zip(rows, made)}
    start = {0: 0.0} if x in AXES else {}
    found = []
    for row in rows:
        step, value = int(row["step"] or 0), row.get(metric)
        version = row.get("eval/policy_version") if metric.startswith("eval/") else None
        place = (start | at).get(step if version is None else int(version), at.get(step))
        if value is not None and place is not None:
            found.append((float(place), float(value)))
    return found


# ---- seeds ---------------------------------------------------------------------------------------


def merge(runs: Sequence[Points], ci: float, sizes: Sequence[Points] | None = None) -> list[Point]:
    """Several runs as one curve. Runs that share their x are merged there, as far as each goes.
    Where every run's x rises but they share none (seconds, tokens), values between two points are
    interpolated, over the range that all cover. Where x itself goes up and down, the n-th points
    of all runs are merged: their mean x, and their mean y. `sizes`: of shares of answers, the
    effective number of answers at these x, for their intervals; an empty one is not known."""
    found: list[tuple[float, list[float], list[float | None]]] = []
    known = [dict(points) for points in sizes or [[] for _ in runs]]
    if len({tuple(x for x, _ in points) for points in runs}) == 1 and _rising(runs[0]):
        found = _at_shared(runs, known)
    elif not all(map(_rising, runs)):
        for its in zip(*runs):
            xs = [x for x, _ in its]
            of = [size.get(x) for size, x in zip(known, xs)]
            found.append((sum(xs) / len(xs), [y for _, y in its], of))
    else:
        common = set.intersection(*({x for x, _ in points} for points in runs))
        if len(common) * 2 > min(map(len, runs)):  # steps: some runs are longer, or lack a row
            found = _at_shared(runs, known)
        else:
            low, high = max(p[0][0] for p in runs), min(p[-1][0] for p in runs)
            grid = sorted({x for points in runs for x, _ in points if low <= x <= high})
            of = [min(size.values(), default=None) for size in known]
            found = [
                (x, [_between(p, x) for p in runs], of) for x in grid[:: -(-len(grid) // GRID) or 1]
            ]
    if sizes is None:
        return [Point(x, t_interval(values, ci)) for x, values, _ in found]
    return [Point(x, share_interval(values, of, ci)) for x, values, of in found]


def _rising(points: Points) -> bool:
    return all(a[0] < b[0] for a, b in itertools.pairwise(points))


def _at_shared(
    runs: Sequence[Points], sizes: Sequence[Mapping[float, float]]
) -> list[tuple[float, list[float], list[float | None]]]:
    values: dict[float, list[tuple[float, float | None]]] = {}
    for points, known in zip(runs, sizes):
        for x, y in points:
            values.setdefault(x, []).append((y, known.get(x)))
    return [(x, [y for y, _ in its], [n for _, n in its]) for x, its in sorted(values.items())]


def _between(points: Points, x: float) -> float:
    """Linear between the two points next to x, which lies within their range."""
    right = bisect.bisect_left(points, x, key=lambda point: point[0])
    (x1, y1) = points[right]
    if x1 == x:
        return y1
    (x0, y0) = points[right - 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


# ---- files ---------------------------------------------------------------------------------------


def as_csv(drawn: Sequence[Curve], asked: Asked) -> str:
    """One line a point; `low` and `high` are empty where there is one run."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["configuration", "metric", asked.x, "mean", "low", "high", "runs", "ci"])
    for curve in drawn:
        for point in curve.points:
            y = point.y
            ends = ["" if end is None else repr(end) for end in (y.low, y.high)]
            place = f"{point.x:.10g}"
            writer.writerow([curve.arm, curve.metric, place, y.mean, *ends, y.n, f"{asked.ci:g}"])
    return file.getvalue()


def _draw(drawn: Sequence[Curve], asked: Asked, target: Path, form: str) -> None:
    """One panel a metric, one colour a configuration, a band from low to high."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            f"format={form} draws with matplotlib, which is not installed: pip install "
            "'rlcore[figures]', or use format=csv."
        ) from error
    metrics = list(dict.fromkeys(curve.metric for curve in drawn))
    if len(asked.ylabel) not in (0, len(metrics)):
        raise UserError(
            f"ylabel={','.join(asked.ylabel)} labels {len(asked.ylabel)} axes, and {len(metrics)} "
            f"metrics are drawn ({', '.join(metrics)}): give one label for each."
        )
    labels = dict(zip(metrics, asked.ylabel or map(_titled, metrics)))
    arms = list(dict.fromkeys(curve.arm for curve in drawn))
    wide = min(len(metrics), 3)
    high = -(-len(metrics) // wide)
    # text stays text in both formats, so that a paper's tools find and restyle it
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "rlcore", "pdf.fonttype": 42}):
        width = asked.width_mm / MM_PER_INCH or PANEL_WIDE * wide
        size = (width, PANEL_HIGH * high * width / (PANEL_WIDE * wide))
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(high, wide, squeeze=False).flatten()
        for panel, metric in itertools.zip_longest(panels, metrics):
            if metric is None:
                panel.set_axis_off()
                continue
            its = [smoothed(c, asked.smooth) for c in drawn if c.metric == metric]
            _panel(panel, its, arms)
            panel.set_xlabel(_titled(asked.x))
            panel.set_ylabel(labels[metric])
        if len(arms) > 1:
            shown = [panel.get_legend_handles_labels() for panel in panels]
            lines = {name: line for its, names in shown for line, name in zip(its, names)}
            _legend(figure, lines, arms)
        content = io.BytesIO()
        moment = {"Date": None} if form == "svg" else {"CreationDate": None}
        figure.savefig(content, format=form, metadata=moment)
    replace_file(target, content.getvalue())


def _legend(figure: Any, lines: Mapping[str, Any], arms: Sequence[str]) -> None:
    """The legend above the panels, in as many columns as the width allows; a name that is wider
    than the figure is written smaller. Widths differ by some percent where another font or
    resolution shows them."""
    for columns in range(min(len(arms), 4), 0, -1):
        place = {"loc": "outside upper center", "ncols": columns}
        legend = figure.legend([lines[arm] for arm in arms], arms, **place)
        width = legend.get_window_extent().width / figure.bbox.width
        if width <= 0.95:
            return
        legend.remove()
    figure.legend([lines[arm] for arm in arms], arms, fontsize=9.0 / width, **place)


MM_PER_INCH, PANEL_WIDE, PANEL_HIGH = 25.4, 3.4, 2.6  # inches
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
STYLES = ("-", "--", "-.", ":")


def smoothed(curve: Curve, width: int) -> Curve:
    """The means and ends of intervals as running means of `width` points, fewer at the start."""
    if width <= 1:
        return curve
    points = []
    for last, point in enumerate(curve.points, start=1):
        its = [p.y for p in curve.points[max(0, last - width) : last]]
        mean, low, high = (_mean([getattr(i, end) for i in its]) for end in ("mean", "low", "high"))
        points.append(Point(point.x, Interval(mean, low, high, point.y.n)))
    return replace(curve, points=points)


def _mean(values: Sequence[float | None]) -> Any:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _panel(panel: Any, its: Sequence[Curve], arms: Sequence[str]) -> None:
    metric = declared(its[0].metric)
    # an interval by Student's t may leave what a share can be
    share = metric is not None and metric.unit == "share"
    least, most = (0.0, 1.0) if share else (-math.inf, math.inf)
    for curve in its:
        place = arms.index(curve.arm)
        # Okabe and Ito's colours can be distinguished by colour-blind readers, and dashes in print
        color, style = COLORS[place % len(COLORS)], STYLES[place % len(STYLES)]
        x, y = [point.x for point in curve.points], [point.y.mean for point in curve.points]
        panel.plot(x, y, style, color=color, label=curve.arm, linewidth=1.2)
        ends = [(p.x, p.y.low, p.y.high) for p in curve.points if p.y.low is not None]
        if ends:
            at, *band = zip(*ends)
            low, high = ([min(max(value, least), most) for value in end] for end in band)
            panel.fill_between(at, low, high, color=color, alpha=0.2, linewidth=0)


def _titled(name: str) -> str:
    metric = declared(name)
    if is_accuracy(name):
        task, _, statistic = name.removeprefix("eval/").rpartition("/")
        kind, _, k = statistic.partition("@")
        said = ACCURACY.get(kind, f"{kind}@{k}")
        return f"{task}: {said}{f' of {k} answers' if k and kind in ACCURACY else ''}"
    unit = metric.unit if metric is not None and metric.unit not in ("1", "") else ""
    return TITLES.get(name, f"{name} [{unit}]" if unit else name)
