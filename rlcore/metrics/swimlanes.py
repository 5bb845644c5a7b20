"""The asynchronous loop of the last steps as a figure: one lane for the learner, for publications,
and for each actor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rlcore.metrics.figures import TIME
from rlcore.metrics.run_folder import Run

LEARNER, PUBLICATIONS = "learner", "publications"
STEPS = 16  # at most
BARS = 600  # at most: an older step is left out before there are more
LEAST_S = 0.002  # shorter spans are not seen
COLORS = {
    "training": "#3b7ddd",
    "p_ref": "#8ab4f8",
    "gathering weights": "#8a5cf0",
    "waiting for a batch": "#e0a030",
    "waiting for actors to load": "#c93a80",
    "waiting for an evaluation": "#9a8f80",
    "checkpoint": "#7a5230",
    "between steps": "#9aa4b1",
    "publication": "#8a5cf0",
    "decoding": "#0f9d6b",
}

Bar = tuple[str, str, str, float, float, float]  # lane, kind, what it is, start, end, share


def swimlanes(run: Run) -> dict[str, Any] | None:
    """A plotly figure of horizontal bars over seconds of training time; None without a record."""
    bars, steps = _last(run.timeline)
    if not bars:
        return None
    lanes = sorted({lane for lane, *_ in bars}, key=_place)
    kinds = [kind for kind in COLORS if any(bar[1] == kind for bar in bars)]
    # an actor's heartbeats begin before the first of these steps
    start = min(b[3] for b in bars if b[0] == LEARNER or lanes[0] != LEARNER)
    end = max(b[4] for b in bars)
    return {
        "question": TIME,
        "wide": True,
        "below": _summary(bars, lanes, end - start),
        "data": [_trace(kind, [bar for bar in bars if bar[1] == kind]) for kind in kinds],
        "layout": {
            "title": {"text": f"Who worked and who waited: {run.name}, {steps}"},
            "barmode": "overlay",
            "bargap": 0.25,
            "xaxis": {"title": {"text": "seconds of training"}, "range": [start, end]},
            "yaxis": {
                "title": {"text": ""},
                "type": "category",
                "categoryorder": "array",
                "categoryarray": lanes[::-1],
                "fixedrange": True,
            },
            "hovermode": "closest",
        },
    }


def _last(lines: Sequence[dict[str, Any]]) -> tuple[list[Bar], str]:
    """The bars of the newest steps, and which steps those are."""
    kept: list[Bar] = []
    first = last = 0
    for line in reversed(lines[-STEPS:]):
        bars = [_bar(*span) for span in line["spans"] if span[3] - span[2] >= LEAST_S]
        if kept and len(kept) + len(bars) > BARS:
            break
        kept += bars
        first, last = line["step"], last or line["step"]
    return kept, f"steps {first} to {last}" if first != last else f"step {last}"


def _bar(who: str, what: str, start: float, end: float, share: float) -> Bar:
    if what.startswith("optimizer step"):
        kind = "training"
    elif what.startswith("p_ref"):
        kind = "p_ref"
    elif who == PUBLICATIONS:
        kind = "publication"
    elif what == "decode":
        kind = "decoding"
    else:
        kind = what if what in COLORS else "between steps"
    return who, kind, what, start, end, share


def _place(lane: str) -> tuple[int, str]:
    fixed = (LEARNER, PUBLICATIONS)
    return (fixed.index(lane) if lane in fixed else len(fixed), lane)


def _trace(kind: str, bars: Sequence[Bar]) -> dict[str, Any]:
    hover = [
        f"{what}, {end - start:.2f} s" + (f", {share:.0%} of it" if kind == "decoding" else "")
        for _, _, what, start, end, share in bars
    ]
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind,
        "legendgroup": kind,
        "color": COLORS[kind],
        "y": [lane for lane, *_ in bars],
        "base": [round(bar[3], 3) for bar in bars],
        "x": [round(bar[4] - bar[3], 3) for bar in bars],
        "text": hover,
        "textposition": "none",
        "hovertemplate": "%{y}: %{text}<extra></extra>",
        "marker": {
            "color": COLORS[kind],
            # how much of a heartbeat's interval the engine worked
            "opacity": [round(0.12 + 0.88 * bar[5], 3) for bar in bars],
            "line": {"width": 0},
        },
    }


def _summary(bars: Sequence[Bar], lanes: Sequence[str], seconds: float) -> list[str]:
    """One sentence a lane: what its time went to."""
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    known: dict[str, float] = defaultdict(float)
    for lane, kind, _, start, end, share in bars:
        spent[lane][kind] += (end - start) * share
        known[lane] += end - start
    said = []
    for lane in lanes:
        whole = seconds if lane == PUBLICATIONS else known[lane]
        parts = sorted(spent[lane].items(), key=lambda pair: -pair[1])
        shares = [f"{kind} {took / whole:.0%}" for kind, took in parts if took >= 0.005 * whole]
        if lane not in (LEARNER, PUBLICATIONS):
            shares.append(f"idle {1 - sum(spent[lane].values()) / whole:.0%}")
        said.append(f"{lane}: {', '.join(shares)}")
    return said
