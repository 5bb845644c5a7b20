"""Writes the page of a study: its table and its figure, from the lines of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from evidence_studies import Study
from evidence_tables import Line, interval, rows
from harness import table

PAGES = Path(__file__).resolve().parent.parent / "docs" / "evidence"
BEGIN, END = "<!-- results: written by benchmarks/evidence.py -->", "<!-- end of results -->"


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


def results(name: str, study: Study, lines: Sequence[Line], digest: str) -> str:
    """The block of a page: the choice, the figure, the table."""
    made = [line for line in lines if "arm" in line]
    if not made:
        return "No run has finished yet."
    text = f"{choice(study, lines)}\n\n![Accuracy over steps and over sizes]({name}.svg)\n\n"
    text += table(rows(lines, "matched", "uncorrected", digest))
    machines = sorted({line["machine"] for line in made})
    return f"{text}\n\n{len(made)} runs on {'; '.join(machines)}."


def choice(study: Study, lines: Sequence[Line]) -> str:
    """One sentence on the size of the mismatch at which the methods are compared."""
    if not study.swept:
        due = len(study.seeds) * len(study.sizes) * (1 + len(study.arms))
        return f"{sum('arm' in line for line in lines)} of {due} runs have finished."
    chosen = [line["chosen"] for line in lines if "chosen" in line]
    if not chosen:
        return "The sweep over sizes is not whole yet, so that no size has been chosen."
    if chosen[0] is None:
        return (
            f"At no size ({study.knob} of {', '.join(study.sizes)}) did the uncorrected arm lose "
            "ten points or collapse, so that no method was compared."
        )
    return f"Chosen by the sweep: {study.knob} = {chosen[0]}."


def draw(file: Path, study: Study, lines: Sequence[Line]) -> None:
    """Left: accuracy over steps of each arm at the chosen size. Middle: over training seconds.
    Right: final accuracy by size.

    Lines are means over seeds, bands 95% bootstrap intervals of the mean."""
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "rlcore", "font.size": 9, "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    chosen = next((line["chosen"] for line in lines if "chosen" in line), None)
    if not study.swept:
        chosen = next(iter(study.sizes))
    shown = [line for line in lines if "arm" in line]
    for arm in dict.fromkeys(line["arm"] for line in shown):
        own = [r for r in shown if r["arm"] == arm and r["size"] in (chosen, study.matched[0])]
        if own:
            _band(left, [r["curve"] for r in own], arm)
            _over_time(middle, [r for r in own if r.get("clock")])
        _by_size(right, study, [r for r in shown if r["arm"] == arm], arm)
    left.set(xlabel="optimizer step", ylabel="held-out accuracy", title=f"{study.knob} = {chosen}")
    middle.set(xlabel="training seconds", ylabel="held-out accuracy", title="mean over seeds")
    right.set(xlabel=study.knob, ylabel="final held-out accuracy", title="by size")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def _band(axis: Any, curves: Sequence[Sequence[Sequence[float]]], name: str) -> None:
    steps = [step for step, _ in curves[0]]
    found = np.array([interval([curve[i][1] for curve in curves]) for i in range(len(steps))])
    axis.plot(steps, found[:, 0], label=name)
    axis.fill_between(steps, found[:, 1], found[:, 2], alpha=0.15)


def _over_time(axis: Any, own: Sequence[Line]) -> None:
    if not own:
        axis.plot([], [])  # the next arm keeps its colour
        return
    seconds = np.mean([line["clock"] for line in own], axis=0)
    axis.plot(seconds, np.mean([[got for _, got in line["curve"]] for line in own], axis=0))


def _by_size(axis: Any, study: Study, own: Sequence[Line], name: str) -> None:
    sizes = [
        size for size in (study.matched[0], *study.sizes) if any(r["size"] == size for r in own)
    ]
    found = [interval([r["final"] for r in own if r["size"] == size]) for size in sizes]
    means = [mean for mean, _, _ in found]
    errors = [[m - low for m, low, _ in found], [high - m for m, _, high in found]]
    axis.errorbar(sizes, means, yerr=errors, marker="o", capsize=3, label=name)
