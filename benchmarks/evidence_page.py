"""Writes the page of a study: its table and its figure, from the lines of its runs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from evidence_studies import UNCORRECTED, Study
from evidence_tables import LEAST, Line, interval, rows
from harness import table

PAGES = Path(__file__).resolve().parent.parent / "docs" / "evidence"
BEGIN, END = "<!-- results: written by benchmarks/evidence.py -->", "<!-- end of results -->"
ACROSS = 3  # panels in a row of a figure
Arm = tuple[str, str, list[Line]]  # its name, its colour in all panels, its runs at one size


def write_page(name: str, study: Study, lines: Sequence[Line], digest: str) -> None:
    """Replace what stands between the markers of the study's page, and its figure.

    Raises ValueError if the page has no markers."""
    page = PAGES / f"{name}.md"
    before, marker, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not marker or not end:
        raise ValueError(f"{page} needs the lines '{BEGIN}' and '{END}'")
    page.write_text(f"{before}{BEGIN}\n\n{results(name, study, lines, digest)}\n\n{END}{after}")
    if any("arm" in line for line in lines):
        draw(PAGES / f"{name}.svg", study, lines)
    at = compared_size(study, lines)
    if metrics := shown_over_time(study, lines, at):
        draw_over_time(_over_time_file(name), compared(study, lines, at), metrics)
    for size in drawn(study, lines):
        draw_size(_size_file(name, size), study, lines, size)


def results(name: str, study: Study, lines: Sequence[Line], digest: str) -> str:
    """The block of a page: the choice, the figure, the table."""
    made = [line for line in lines if "arm" in line]
    if not made:
        return "No run has finished yet."
    text = f"{choice(study, lines)}\n\n![Accuracy over steps and over sizes]({name}.svg)\n\n"
    if shown_over_time(study, lines, compared_size(study, lines)):
        text += f"![Means over the steps between evaluations]({_over_time_file(name).name})\n\n"
    for size in drawn(study, lines):
        title = f"Accuracy, and means between evaluations, at {study.knob} = {size}"
        text += f"![{title}]({_size_file(name, size).name})\n\n"
    text += table(rows(lines, (study.reference, UNCORRECTED), digest, timed=study.timed))
    machines = sorted({line["machine"] for line in made})
    return f"{text}\n\n{len(made)} runs on {'; '.join(machines)}."


def drawn(study: Study, lines: Sequence[Line]) -> list[str]:
    """The sizes that have runs and a figure of their own."""
    made = {line["size"] for line in lines if "arm" in line}
    return [size for size in study.drawn if size in made]


def shown_over_time(study: Study, lines: Sequence[Line], size: str) -> list[str]:
    """The study's metrics that some run compared at this size has over time."""
    watched = [r.get("watched", {}) for _, _, own in compared(study, lines, size) for r in own]
    return [
        name
        for name in study.watched
        if any(value is not None for own in watched for value in own.get(name, ()))
    ]


def choice(study: Study, lines: Sequence[Line]) -> str:
    """One sentence on the size of the mismatch at which the methods are compared."""
    if not study.swept:
        arms = 1 + len(study.sizes) * len(study.arms) + sum(map(len, study.further.values()))
        due = len(study.seeds) * arms
        return f"{sum('arm' in line for line in lines)} of {due} runs have finished."
    chosen = [line["chosen"] for line in lines if "chosen" in line]
    if not chosen:
        return "The sweep over sizes is not whole yet, so that no size has been chosen."
    if chosen[0] is None:
        where = (
            f"methods run where that was declared before: at {' and at '.join(study.further)}"
            if study.further
            else "no method was compared"
        )
        return (
            f"At no size ({study.knob} of {', '.join(study.sizes)}) did the uncorrected arm lose "
            f"ten points or collapse, so that {where}."
        )
    return f"Chosen by the sweep: {study.knob} = {chosen[0]}."


def draw(file: Path, study: Study, lines: Sequence[Line]) -> None:
    """Accuracy over steps of each arm at the size of the comparison, over training seconds if the
    study is timed, and final accuracy by size if it has several.

    Lines are means over seeds, bands 95% bootstrap intervals of the mean, where there are five."""
    size = compared_size(study, lines)
    arms, by_size = compared(study, lines, size), len(study.sizes) > 1
    with _panels(file, 1 + study.timed + by_size) as axes:
        _over_steps(axes[0], arms, f"{study.knob} = {size}")
        if study.timed:
            _over_seconds(axes[1], arms)
        if by_size:
            _by_size(axes[-1], study, lines)


def draw_over_time(file: Path, arms: Sequence[Arm], metrics: Sequence[str]) -> None:
    """Each metric of each arm, over steps: means over the steps since the evaluation before and
    over seeds."""
    with _panels(file, len(metrics)) as axes:
        for axis, metric in zip(axes, metrics):
            _metric(axis, arms, metric)


def draw_size(file: Path, study: Study, lines: Sequence[Line], size: str) -> None:
    """Accuracy and the study's metrics over steps, of each arm at this size."""
    arms, metrics = compared(study, lines, size), shown_over_time(study, lines, size)
    with _panels(file, 1 + len(metrics), f"{study.knob} = {size}") as axes:
        _over_steps(axes[0], arms, "held-out accuracy")
        for axis, metric in zip(axes[1:], metrics):
            _metric(axis, arms, metric)


@contextlib.contextmanager
def _panels(file: Path, count: int, title: str | None = None) -> Iterator[list[Any]]:
    """Axes, at most three in a row, with one legend; written to the file at the end."""
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "rlcore", "font.size": 9, "svg.fonttype": "none"})
    from matplotlib import pyplot

    across, down = min(count, ACROSS), -(-count // ACROSS)
    figure, grid = pyplot.subplots(
        down, across, figsize=(1 + 4 * across, 4 * down), layout="constrained", squeeze=False
    )
    if title is not None:
        figure.suptitle(title)
    axes = list(grid.flat)
    for unused in axes[count:]:
        unused.set_visible(False)
    yield axes[:count]
    arms = {}  # some may be in one panel alone
    for axis in axes:
        arms |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(arms.values(), arms.keys(), loc="outside lower center", ncols=5)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def _over_steps(axis: Any, arms: Sequence[Arm], title: str) -> None:
    for arm, colour, own in arms:
        curves = [line["curve"] for line in own]
        steps = [step for step, _ in curves[0]]
        found = np.array([interval([c[i][1] for c in curves]) for i in range(len(steps))])
        axis.plot(steps, found[:, 0], label=arm, color=colour)
        if len(own) >= LEAST:
            axis.fill_between(steps, found[:, 1], found[:, 2], alpha=0.15, color=colour)
    axis.set(xlabel="optimizer step", ylabel="held-out accuracy", title=title)


def _over_seconds(axis: Any, arms: Sequence[Arm]) -> None:
    for arm, colour, own in arms:
        at = [line for line in own if line.get("clock")]
        if at:
            seconds = np.mean([line["clock"] for line in at], axis=0)
            accuracy = np.mean([[got for _, got in line["curve"]] for line in at], axis=0)
            axis.plot(seconds, accuracy, label=arm, color=colour)
    axis.set(xlabel="training seconds", ylabel="held-out accuracy", title="mean over seeds")


def _metric(axis: Any, arms: Sequence[Arm], metric: str) -> None:
    for arm, colour, own in arms:
        found = [r["watched"][metric] for r in own if metric in r.get("watched", ())]
        if any(value is not None for means in found for value in means):
            steps = [step for step, _ in own[0]["curve"]]
            means = np.array(found, dtype=float).mean(axis=0)
            axis.plot(steps, means, marker=".", label=arm, color=colour)
    axis.set(xlabel="optimizer step", title=metric)


def _by_size(axis: Any, study: Study, lines: Sequence[Line]) -> None:
    for arm, colour, own in _by_arm(lines):
        sizes = [s for s in (study.matched[0], *study.sizes) if any(r["size"] == s for r in own)]
        found = [interval([r["final"] for r in own if r["size"] == size]) for size in sizes]
        means = [mean for mean, _, _ in found]
        whole = all(sum(r["size"] == size for r in own) >= LEAST for size in sizes)
        errors = [[m - low for m, low, _ in found], [high - m for m, _, high in found]]
        axis.errorbar(
            sizes,
            means,
            yerr=errors if whole else None,
            marker="o",
            capsize=3,
            label=arm,
            color=colour,
        )
    axis.set(xlabel=study.knob, ylabel="final held-out accuracy", title="by size")


def _by_arm(lines: Sequence[Line]) -> list[Arm]:
    """Each arm with its colour, the same in all panels, and its runs."""
    made = [line for line in lines if "arm" in line]
    arms = dict.fromkeys(line["arm"] for line in made)
    return [(arm, f"C{i}", [r for r in made if r["arm"] == arm]) for i, arm in enumerate(arms)]


def compared(study: Study, lines: Sequence[Line], size: str) -> list[Arm]:
    """Each arm with its colour and its runs at this size, or at the matched size if it has none
    there."""
    found = []
    for arm, colour, own in _by_arm(lines):
        at = {label: [r for r in own if r["size"] == label] for label in (size, study.matched[0])}
        if shown := at[size] or at[study.matched[0]]:
            found.append((arm, colour, shown))
    return found


def compared_size(study: Study, lines: Sequence[Line]) -> str:
    """The size at which arms are compared: the one that a sweep has chosen, else the one that the
    study shows, else the largest."""
    chosen = [line["chosen"] for line in lines if "chosen" in line] if study.swept else []
    return (chosen[0] if chosen else None) or study.shown or list(study.sizes)[-1]


def _over_time_file(name: str) -> Path:
    return PAGES / f"{name}_over_time.svg"


def _size_file(name: str, size: str) -> Path:
    """Example: ais and "int3, all; none" give ais_at_int3_all_none.svg."""
    return PAGES / f"{name}_at_{re.sub(r'[^a-z0-9]+', '_', size)}.svg"
