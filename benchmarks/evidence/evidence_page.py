"""Writes the page of a study: its table and its figure, from the lines of its runs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from benchmarks.evidence.evidence_held import draw_held, held_rows
from benchmarks.evidence.evidence_programme import Hypothesis, Registered
from benchmarks.evidence.evidence_studies import UNCORRECTED, Study
from benchmarks.evidence.evidence_tables import (
    LEAST,
    LEVEL,
    Contrast,
    Family,
    Line,
    family,
    holm,
    interval,
    on_actors,
    resolution,
    rows,
)
from benchmarks.harness import table

PAGES = Path(__file__).resolve().parents[1] / "results" / "evidence"
BEGIN, END = (
    "<!-- results: written by benchmarks/evidence/evidence.py -->",
    "<!-- end of results -->",
)
MOST = 4  # arms in a panel
Arm = tuple[str, list[Line]]  # its name, its runs at one size

#: The colour of an arm on every page; arms that share one never share a page's figure.
COLOURS = {
    "matched": "0.25",
    UNCORRECTED: "C3",
    "none": "C3",
    "no weights": "C5",
    "token IS": "C0",
    "tis": "C0",
    "tis C=10": "C0",
    "tis adjusted": "C9",
    "tis C=5": "C9",
    "ppo 0.2/0.2": "C3",
    "ppo 0.4/0.7": "C1",
    "TRL": "C9",
    "by kind": "C0",
    "pooled": "C1",
    "set-point": "C2",
    "first controller": "C1",
    "few pages": "C3",
    "equal pages": "C0",
    "ais": "C1",
    "ais by size": "C6",
    "mis": "C5",
    "jackpot": "C2",
    "jackpot, drawn": "C8",
    "jackpot new": "C2",
    "jackpot new, clip on": "C8",
    "dvp": "C4",
    "dvp rho=1e-3": "C4",
    "dvp + mis": "C6",
    "decoupled ppo": "C6",
    "vcpo": "C1",
    "rapid": "C4",
    "grpo": "C7",
    "asynchronous": "C5",
    "round_as": "C2",
    "distillsparse": "C4",
    "distilled": "C4",
    "both": "C6",
    "distillsparse, 8 of 12": "C6",
    "training-free": "C0",
    "k=20, lambda=1, C1=3": "C2",
    "mode=mask": "C3",
    "mode=reweight": "C0",
    "Z=none": "C1",
}


def write_page(name: str, study: Study, lines: Sequence[Line], digest: str) -> None:
    """Replace what stands between the markers of the study's page, and its figure."""
    replace_block(PAGES / f"{name}.md", results(name, study, lines, digest))
    if compared(study, lines, compared_size(study, lines)):
        draw(PAGES / f"{name}.svg", study, lines)


def replace_block(page: Path, block: str) -> None:
    """Replace what stands between the markers of a page. Raises ValueError if it has none."""
    before, marker, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not marker or not end:
        raise ValueError(f"{page} needs the lines '{BEGIN}' and '{END}'")
    page.write_text(f"{before}{BEGIN}\n\n{block}\n\n{END}{after}")


def results(name: str, study: Study, lines: Sequence[Line], digest: str) -> str:
    """The block of a page: the choice, the figure, the table, what its differences can show, and
    what the study does otherwise than the paper."""
    made = [line for line in lines if "arm" in line]
    parts = [choice(study, lines)] if made else ["No run has finished yet."]
    if made:
        members = family(lines, (study.reference, UNCORRECTED), study.contrasts)
        shown = rows(
            *(lines, (study.reference, UNCORRECTED), digest, members),
            timed=study.timed,
            against=study.against,
        )
        if compared(study, lines, compared_size(study, lines)):  # else too few seeds
            parts.append(f"![Accuracy over steps and over sizes]({name}.svg)")
        parts += [table(shown)] if shown else []
        if study.held is not None:
            cells = dict.fromkeys((line["arm"], line["size"]) for line in made)
            own = [(c[0], [r for r in made if (r["arm"], r["size"]) == c]) for c in cells]
            parts.append(table(held_rows(study.held, own)))
        parts += [_contrasts(study.contrasts, members)] if study.contrasts else []
        parts += [_said(members)] if members else []
        if len(study.deployed) == 1:
            compared_to = (study.reference, UNCORRECTED)
            deployed = family(lines, compared_to, study.contrasts, of=on_actors)
            parts.append(f"Policies on the actors:\n\n{_contrasts(tuple(deployed), deployed)}")
            parts.append(_said(deployed, "table"))
        parts += [_origin(made, digest)]
    if study.deviations:
        columns = ("of", "paper", "here")
        rows_of = [dict(zip(columns, deviation)) for deviation in study.deviations]
        parts.append("Otherwise than in the paper:\n\n" + table(rows_of, columns))
    return "\n\n".join(parts)


def write_programme(programme: Mapping[str, Registered], lines: Mapping[str, list[Line]]) -> None:
    """The page of registered studies: hypotheses with their verdicts, gates and stopping rules."""
    hypotheses = [
        {
            "study": f"{registered.number}: {name}",
            "hypothesis": str(hypothesis),
            "runs": _counted(registered.study, lines[name]),
            "verdict": _verdict(registered, hypothesis, lines[name]),
        }
        for name, registered in programme.items()
        for hypothesis in registered.hypotheses
    ]
    rules = [
        {
            "study": name,
            "arms": ", ".join(_arms(registered.study)),
            "sizes": f"{registered.study.knob} of {'; '.join(registered.study.sizes)}",
            "seeds": len(registered.study.seeds),
            "gate": registered.gate.text,
            "met": _GATE[registered.gate.met(lines[name])],
            "stopping, beside all seeds": registered.stopping,
        }
        for name, registered in programme.items()
    ]
    replace_block(PAGES / "programme.md", f"{table(hypotheses)}\n\n{table(rules)}")


def _arms(study: Study) -> list[str]:
    further = [arm for arms in study.further.values() for arm in arms]
    return list(dict.fromkeys([study.reference, *study.arms, *further]))


_GATE = {True: "yes", False: "no", None: ""}


def _verdict(registered: Registered, hypothesis: Hypothesis, lines: Sequence[Line]) -> str:
    """Of a study whose runs are not all done it holds so far: it ends by its own rule, not by the
    first verdict that pleases. Where the gate is not met it is no verdict."""
    found = hypothesis.verdict(lines)
    if found == "not run":
        return found
    done, total = _counted(registered.study, lines).split(" of ")
    found = found if int(done) >= int(total) else f"{found} so far"
    gate = hypothesis.gate or registered.gate
    return f"none, gate not met (else {found})" if gate.met(lines) is False else found


def _counted(study: Study, lines: Sequence[Line]) -> str:
    cells = 1 + len(study.sizes) * len({*study.arms, *([UNCORRECTED] if study.swept else [])})
    cells += sum(map(len, study.further.values()))
    made = sum(line.get("arm") in _arms(study) for line in lines)
    return f"{made} of {cells * len(study.seeds)}"


def _contrasts(chosen: Sequence[Contrast], members: Family) -> str:
    adjusted = holm(members)
    shown = [
        {
            "arm": arm,
            "against": other,
            "size": size,
            "difference": members[arm, other, size].text(
                adjusted.get((arm, other, size), 1) < LEVEL
            ),
        }
        for arm, other, size in chosen
    ]
    return table(shown)


def _said(members: Family, whole: str = "page") -> str:
    """How the differences are to be read, and how small ones the study can show."""
    refused = sum(difference.refused for difference in members.values())
    kept = sum(p < LEVEL for p in holm(members).values())
    text = (
        f"Differences are paired by starting model, with 95% intervals of Student's t; bold: below "
        f"{LEVEL:g} after Holm's correction for the {len(members)} differences of this {whole}, "
        f"which {kept} are. Resolution: half of the intervals are wider than "
        f"±{resolution(members):.3f}."
    )
    if refused:
        text += f" {refused} pairs that began from different models were refused."
    return text


def _origin(made: Sequence[Line], digest: str) -> str:
    machines = sorted({line["machine"] for line in made})
    old = sum(line["sources"] != digest for line in made)
    aged = (
        ""
        if not old
        else (
            f" {'All' if old == len(made) else old} of them are older than today's sources of the "
            "study (rollout, learner, corrections, warm-up, task)."
        )
    )
    return f"{len(made)} runs on {'; '.join(machines)}.{aged}"


def choice(study: Study, lines: Sequence[Line]) -> str:
    """One sentence on the size of the mismatch at which the methods are compared."""
    if not study.swept:
        arms = 1 + len(study.sizes) * len(study.arms) + sum(map(len, study.further.values()))
        due = len(study.seeds) * arms
        made = [line for line in lines if "arm" in line and line["arm"] not in study.replaced]
        return f"{len(made)} of {due} runs have finished."
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
    """Accuracy over steps of the study's figure arms at the size of the comparison, over training
    seconds if the study is timed, and final accuracy by size if it has several.

    Lines are means over seeds, bands 95% intervals of Student's t."""
    size = compared_size(study, lines)
    arms = compared(study, lines, size)
    by_size = len(study.sizes) > 1
    held = 2 if study.held is not None else 0
    with panels(file, 1 + study.timed + by_size + held) as axes:
        _over_steps(axes[0], study, arms, f"{study.knob} = {size}")
        if study.timed:
            _over_seconds(axes[1], arms)
        if by_size:
            _by_size(axes[1 + study.timed], study, lines)
        if study.held is not None:
            draw_held(axes[-held:], study.held, arms, COLOURS)


@contextlib.contextmanager
def panels(file: Path, count: int) -> Iterator[list[Any]]:
    """Axes side by side with one legend; written to the file at the end."""
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "rlcore", "font.size": 9, "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        1, count, figsize=(1 + 3.6 * count, 4), layout="constrained", squeeze=False
    )
    axes = list(grid.flat)
    yield axes
    arms = {}  # some may be in one panel alone
    for axis in axes:
        arms |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(arms.values(), arms.keys(), loc="outside lower center", ncols=5)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def _over_steps(axis: Any, study: Study, arms: Sequence[Arm], title: str) -> None:
    for arm, own in arms:
        curves = [line["curve"] for line in own]
        steps = [step for step, _ in curves[0]]
        found = np.array([interval([c[i][1] for c in curves]) for i in range(len(steps))])
        # between publications the policy that is evaluated stays what it is
        stepped = study.stepped and own[0]["size"] != study.matched[0]
        style = "steps-post" if stepped else "default"
        axis.plot(steps, found[:, 0], label=arm, color=COLOURS[arm], drawstyle=style)
        axis.fill_between(
            *(steps, found[:, 1], found[:, 2]),
            alpha=0.15,
            color=COLOURS[arm],
            step="post" if stepped else None,
        )
    axis.set(xlabel="optimizer step", ylabel="held-out accuracy", title=title)


def _over_seconds(axis: Any, arms: Sequence[Arm]) -> None:
    for arm, own in arms:
        at = [line for line in own if line.get("clock")]
        if at:
            seconds = np.mean([line["clock"] for line in at], axis=0)
            accuracy = np.mean([[got for _, got in line["curve"]] for line in at], axis=0)
            axis.plot(seconds, accuracy, label=arm, color=COLOURS[arm])
    axis.set(xlabel="training seconds", ylabel="held-out accuracy", title="mean over seeds")


def _by_size(axis: Any, study: Study, lines: Sequence[Line]) -> None:
    further = () if study.swept else study.further  # of a sweep, they are of other kinds
    made = {line["size"] for line in lines if "arm" in line}
    named = dict.fromkeys((study.matched[0], *study.sizes, *further))
    order = [s for s in named if s in made]
    for number, arm in enumerate(study.figure):
        at = {s: [r["final"] for r in _at(lines, arm, s)] for s in order}
        found = {s: interval(finals) for s, finals in at.items() if len(finals) >= LEAST}
        # sizes of another kind ("int3, 512") are no steps of one scale: no line joins them
        kinds = itertools.groupby(found, lambda s: "" if study.swept else s.rpartition(", ")[0])
        for _, own in kinds:
            sizes = list(own)
            means, lows, highs = np.array([found[s] for s in sizes]).T
            places = [order.index(size) + 0.06 * number for size in sizes]  # beside each other
            axis.errorbar(
                *(places, means, [means - lows, highs - means]),
                **{"marker": "o", "capsize": 3, "label": arm, "color": COLOURS[arm]},
            )
    axis.set(xlabel=study.knob, ylabel="final held-out accuracy", title="by size")
    axis.set_xticks(range(len(order)), order, rotation=20 if max(map(len, order)) > 4 else 0)


def _at(lines: Sequence[Line], arm: str, size: str) -> list[Line]:
    return [r for r in lines if r.get("arm") == arm and r["size"] == size]


def compared(study: Study, lines: Sequence[Line], size: str) -> list[Arm]:
    """The study's figure arms with their runs at this size, or at the matched size for those that
    have none there; arms with few seeds are left out."""
    found = []
    for arm in study.figure:
        shown = _at(lines, arm, size) or _at(lines, arm, study.matched[0])
        if len(shown) >= LEAST:
            found.append((arm, shown))
    return found


def compared_size(study: Study, lines: Sequence[Line]) -> str:
    """The size at which arms are compared: the one that a sweep has chosen, else the one that the
    study shows, else the largest."""
    chosen = [line["chosen"] for line in lines if "chosen" in line] if study.swept else []
    return (chosen[0] if chosen else None) or study.shown or list(study.sizes)[-1]
