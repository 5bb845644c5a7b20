"""Writes the page of a study: its table and its figure, from the lines of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from evidence_studies import UNCORRECTED, Study
from evidence_tables import LEAST, Line, interval, rows
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
    text += table(rows(lines, (study.reference, UNCORRECTED), digest, timed=study.timed))
    machines = sorted({line["machine"] for line in made})
    return f"{text}\n\n{len(made)} runs on {'; '.join(machines)}."


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
        return (
            f"At no size ({study.knob} of {', '.join(study.sizes)}) did the uncorrected arm lose "
            "ten points or collapse, so that no method was compared."
        )
    return f"Chosen by the sweep: {study.knob} = {chosen[0]}."


def draw(file: Path, study: Study, lines: Sequence[Line]) -> None:
    """Accuracy over steps of each arm at the chosen size, over training seconds if the study is
    timed, and final accuracy by size if it has several.

    Lines are means over seeds, bands 95% bootstrap intervals of the mean, where there are five."""
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "rlcore", "font.size": 9, "svg.fonttype": "none"})
    from matplotlib import pyplot

    panels = [_over_steps, *[_over_time] * study.timed, *[_by_size] * (len(study.sizes) > 1)]
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(1 + 4 * len(panels), 4), layout="constrained", squeeze=False
    )
    for axis, panel in zip(axes[0], panels):
        panel(axis, study, lines)
    figure.legend(*axes[0][-1].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def _over_steps(axis: Any, study: Study, lines: Sequence[Line]) -> None:
    chosen = _compared_at(study, lines)
    for arm, colour, own in _by_arm(lines):
        at = [r["curve"] for r in own if r["size"] in (chosen, study.matched[0])]
        if at:
            steps = [step for step, _ in at[0]]
            found = np.array([interval([c[i][1] for c in at]) for i in range(len(steps))])
            axis.plot(steps, found[:, 0], label=arm, color=colour)
            if len(at) >= LEAST:
                axis.fill_between(steps, found[:, 1], found[:, 2], alpha=0.15, color=colour)
    axis.set(xlabel="optimizer step", ylabel="held-out accuracy", title=f"{study.knob} = {chosen}")


def _over_time(axis: Any, study: Study, lines: Sequence[Line]) -> None:
    chosen = _compared_at(study, lines)
    for arm, colour, own in _by_arm(lines):
        at = [r for r in own if r.get("clock") and r["size"] in (chosen, study.matched[0])]
        if at:
            seconds = np.mean([line["clock"] for line in at], axis=0)
            accuracy = np.mean([[got for _, got in line["curve"]] for line in at], axis=0)
            axis.plot(seconds, accuracy, label=arm, color=colour)
    axis.set(xlabel="training seconds", ylabel="held-out accuracy", title="mean over seeds")


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


def _by_arm(lines: Sequence[Line]) -> list[tuple[str, str, list[Line]]]:
    """Each arm with its colour, the same in all panels, and its runs."""
    made = [line for line in lines if "arm" in line]
    arms = dict.fromkeys(line["arm"] for line in made)
    return [(arm, f"C{i}", [r for r in made if r["arm"] == arm]) for i, arm in enumerate(arms)]


def _compared_at(study: Study, lines: Sequence[Line]) -> str | None:
    """The size at which arms are compared: the chosen one, if the study has a sweep."""
    if not study.swept:
        return study.shown
    return next((line["chosen"] for line in lines if "chosen" in line), None)
