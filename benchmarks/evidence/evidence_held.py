"""A study's statistic that a set-point holds: its table and its panels, from the lines of runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.evidence.evidence_studies import MOVED, Held, Study, Words
from benchmarks.evidence.evidence_tables import Line, interval

Arm = tuple[str, Sequence[Line]]


def held_rows(held: Held, arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """A row an arm: the statistic of each stretch over the second half of training, as mean and
    range over seeds, and what is moved, as the mean over training. Arms that watch neither are
    left out."""
    found = []
    for arm, own in arms:
        row: dict[str, Any] = {"arm": arm, "size": own[0]["size"], "seeds": len(own)}
        for place, name in held.statistic.items():
            values = [late for line in own if (late := second_half(line, name)) is not None]
            if values:
                low, high = min(values), max(values)
                row[f"statistic, {place}"] = f"{np.mean(values):.3f} ({low:.3f} to {high:.3f})"
        for place, name in held.moved.items():
            values = [mean for line in own if (mean := over_steps(line, name)) is not None]
            if values:
                row[f"{held.unit}, {place}"] = f"{np.mean(values):.2f}"
        if len(row) > 3:
            found.append(row)
    columns = list(dict.fromkeys(name for row in found for name in row))
    return [{name: row.get(name, "") for name in columns} for row in found]


def second_half(line: Line, name: str) -> float | None:
    """Mean of a watched metric over the steps of a run's second half, by windows between its
    evaluations; None where the run has none."""
    return _mean(line, name, line["curve"][-1][0] / 2)


def over_steps(line: Line, name: str) -> float | None:
    """Mean of a watched metric over the steps of a run."""
    return _mean(line, name, 0.0)


def settled(study: Study, found: Sequence[Line], words: Words) -> Words | None:
    """Words with the number that a set-point has moved (`Held`) in the place of `MOVED`; None while
    the run that decides it is missing."""
    if not any(MOVED in word for word in words):
        return words
    held = study.held
    assert held is not None
    own = [r for r in found if (r.get("arm"), r.get("seed")) == (held.arm, study.seeds[0])]
    means = [over_steps(line, name) for line in own for name in held.moved.values()]
    if not means:
        return None
    number = round(statistics.fmean(mean for mean in means if mean is not None))
    return tuple(word.replace(MOVED, str(number)) for word in words)


def _mean(line: Line, name: str, after: float) -> float | None:
    """Weighted by the steps of each window; windows that begin before `after` do not count."""
    ends = [step for step, _ in line["curve"]]
    starts = [0, *ends[:-1]]
    values = line.get("watched", {}).get(name) or [None] * len(ends)
    parts = [(v, b - a) for a, b, v in zip(starts, ends, values) if v is not None and a >= after]
    steps = sum(count for _, count in parts)
    return sum(v * count for v, count in parts) / steps if steps else None


def draw_held(
    axes: Sequence[Any], held: Held, arms: Sequence[Arm], colours: Mapping[str, str]
) -> None:
    """Two panels: the statistic over training, a line a stretch, and by stretch over the second
    half. Bands and bars are 95% intervals of Student's t over seeds; grey is the set-point."""
    styles = ("-", "--", ":", "-.")
    for arm, own in arms:
        for style, name in zip(styles, held.statistic.values()):
            curves = [line.get("watched", {}).get(name) for line in own]
            kept = [curve for curve in curves if curve and None not in curve]
            if kept:
                steps = [step for step, _ in own[0]["curve"]]
                found = np.array([interval(column) for column in zip(*kept)])
                axes[0].plot(steps, found[:, 0], style, color=colours[arm], label=arm)
                axes[0].fill_between(steps, *found[:, 1:].T, alpha=0.12, color=colours[arm])
        _by_stretch(axes[1], held, arm, own, colours[arm])
    for axis in axes:
        axis.axhspan(held.value - held.within, held.value + held.within, color="0.5", alpha=0.25)
    shown = ", ".join(f"{place} {style}" for place, style in zip(held.statistic, styles))
    axes[0].set(xlabel="optimizer step", ylabel=held.name, title=f"positions: {shown}")
    axes[1].set(xlabel="positions", ylabel=held.name, title="second half of training")
    axes[1].set_xticks(range(len(held.statistic)), list(held.statistic))


def _by_stretch(axis: Any, held: Held, arm: str, own: Sequence[Line], colour: str) -> None:
    values = [[second_half(line, name) for line in own] for name in held.statistic.values()]
    kept = [[v for v in stretch if v is not None] for stretch in values]
    if not all(kept):
        return
    found = np.array([interval(stretch) for stretch in kept])
    errors = np.abs(found[:, 1:].T - found[:, 0])
    axis.errorbar(
        *(range(len(kept)), found[:, 0]),
        yerr=errors,
        marker="o",
        capsize=3,
        color=colour,
        label=arm,
    )
