"""The charts of a report by the question that they answer, and the timeline of its processes, as
plotly figures in plain data."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.metrics.metric import Metric
from rlcore.metrics.names import declared, split_kind
from rlcore.metrics.rows import Row
from rlcore.metrics.run_folder import Run

LEARNER, PUBLICATIONS = "learner", "publications"
STEPS = 16  # at most
BARS = 600  # at most: an older step is left out before there are more
LEAST_S = 0.002  # shorter spans are not seen
LANE_COLORS = {
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
    kinds = [kind for kind in LANE_COLORS if any(bar[1] == kind for bar in bars)]
    # an actor's heartbeats begin before the first of these steps
    start = min(b[3] for b in bars if b[0] == LEARNER or lanes[0] != LEARNER)
    end = max(b[4] for b in bars)
    return {
        "question": TIME,
        "wide": True,
        "below": _summary(bars, lanes, end - start),
        "data": [_lane_trace(kind, [bar for bar in bars if bar[1] == kind]) for kind in kinds],
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
        kind = what if what in LANE_COLORS else "between steps"
    return who, kind, what, start, end, share


def _place(lane: str) -> tuple[int, str]:
    fixed = (LEARNER, PUBLICATIONS)
    return (fixed.index(lane) if lane in fixed else len(fixed), lane)


def _lane_trace(kind: str, bars: Sequence[Bar]) -> dict[str, Any]:
    hover = [
        f"{what}, {end - start:.2f} s" + (f", {share:.0%} of it" if kind == "decoding" else "")
        for _, _, what, start, end, share in bars
    ]
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind,
        "legendgroup": kind,
        "color": LANE_COLORS[kind],
        "y": [lane for lane, *_ in bars],
        "base": [round(bar[3], 3) for bar in bars],
        "x": [round(bar[4] - bar[3], 3) for bar in bars],
        "text": hover,
        "textposition": "none",
        "hovertemplate": "%{y}: %{text}<extra></extra>",
        "marker": {
            "color": LANE_COLORS[kind],
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


COLORS = ("#3b7ddd", "#dc4040", "#0f9d6b", "#d98a1f", "#8a5cf0", "#1596ad", "#c93a80", "#6a8f1f")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
# Not charted: the x axis, or shown in the table above the charts.
NOT_CHARTED = {"step", "policy_version", "eval/policy_version", "metrics/nonfinite", "time/step_s"}
DIGITS = 5  # that a curve's values have
LEARNS, FRESH, AGREE, TIME, ELSE = QUESTIONS = (
    "Does it learn?",
    "Is it fresh?",
    "Do actor and learner agree?",
    "Where does the time go?",
    "Everything else",
)


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure: the metrics it shows, by name or by a declared family's template.

    Example: Chart(LEARNS, "Reward", ("reward/mean", "reward_parts/<part>"))
    """

    question: str
    title: str
    names: tuple[str, ...]
    stacked: bool = False
    log: bool = False

    def shows(self, name: str) -> bool:
        """Return whether the chart shows this metric."""
        pooled, kind = split_kind(name)
        if kind and self.stacked:
            return False  # parts of a whole are stacked, and those of a kind are parts of another
        # An undeclared metric is matched as well: users log what they like.
        return any(Metric(pattern, "", "").covers(pooled) for pattern in self.names)


@dataclass(frozen=True, slots=True)
class Family:
    """Runs that differ by their seed alone; usually one run."""

    name: str
    runs: Sequence[Run]


def _each(template: str, *values: str) -> tuple[str, ...]:
    return tuple(template.format(value) for value in values)


CHARTS = (
    Chart(
        LEARNS,
        "Held-out accuracy",
        _each("eval/<task>/{}", "greedy", "mean@<k>", "pass@<k>", "majority@<k>"),
    ),
    Chart(LEARNS, "Reward", ("reward/mean", "reward/selected_mean")),
    Chart(LEARNS, "Held-out reward", _each("eval/<task>/{}_reward", "greedy", "sampled")),
    Chart(LEARNS, "Parts of the reward", ("reward_parts/<part>",)),
    Chart(LEARNS, "Reward by task", ("task/<task>/reward_mean",)),
    Chart(LEARNS, "Groups of the batch by task", ("task/<task>/groups",), stacked=True),
    Chart(LEARNS, "Tokens by task", ("task/<task>/token_share",), stacked=True),
    Chart(LEARNS, "Problems by difficulty", _each("task/<task>/{}", "seen", "solved", "hopeless")),
    Chart(LEARNS, "Response length", ("response_length/mean", "response_length/max")),
    Chart(LEARNS, "Entropy", ("entropy",)),
    Chart(LEARNS, "Loss", ("loss/policy", "loss/kl", "loss/<part>")),
    Chart(LEARNS, "Gradient norm", ("grad_norm",), log=True),
    Chart(
        FRESH,
        "Staleness",
        _each("staleness/{}", "mean", "max", "in_flight_mean", "in_buffer_mean"),
    ),
    Chart(FRESH, "Age of trained tokens", ("staleness/share_<age>",), stacked=True),
    Chart(AGREE, "KL(p_inf || p_ref)", ("mismatch/kl_k1", "mismatch/kl_k3")),
    Chart(
        AGREE,
        "|log p_ref - log p_inf|",
        ("mismatch/abs_dlogp_mean", "mismatch/abs_dlogp_max"),
        log=True,
    ),
    Chart(
        AGREE,
        "Tails of p_ref/p_inf",
        ("mismatch/agreement_p5", *_each("mismatch/ratio_p{}", "1", "5", "95", "99")),
    ),
    Chart(AGREE, "p_ref/p_inf, 5th percentile by eighths", ("mismatch/eighth_<n>/ratio_p5",)),
    Chart(AGREE, "Answers above which correcting pays", ("mismatch/n_star",), log=True),
    Chart(AGREE, "Effective sample size", ("mismatch/ess", "mismatch/acceptance")),
    Chart(
        AGREE,
        "Tokens affected",
        _each("mismatch/{}_share", "truncated", "masked", "veto", "outside"),
    ),
    Chart(
        AGREE,
        "Corrections: share and weight",
        _each("correction/{}", "kept_share", "weight_mean", "zero_weight_share"),
    ),
    Chart(AGREE, "Corrections: their own figures", ("correction/<name>/<statistic>",)),
    Chart(
        TIME,
        "Time of a step",
        ("time/wait_data_s", "time/learn_s", "time/publish_s", "rest_s"),
        stacked=True,
    ),
    Chart(TIME, "Throughput", _each("throughput/{}_tokens_per_s", "rollout", "train")),
    Chart(TIME, "Effective tokens an actor-second by kind", ("worth/tokens_per_actor_s",)),
    Chart(TIME, "Effective tokens a unit of money by kind", ("worth/tokens_per_price",)),
    Chart(TIME, "Buffer", ("buffer/groups", "buffer/in_flight")),
    Chart(TIME, "Ledger", ("ledger/<count>",)),
)


def figures(families: Sequence[Family]) -> list[dict[str, Any]]:
    """Every chart that has data, and those of all other metrics, so that nothing logged is hidden
    but most percentiles of eighths of answers."""
    names = {n for f in families for run in f.runs for r in run.rows for n in r} - NOT_CHARTED
    names -= {n for n in names if "/eighth_" in n and "/ratio_p5" not in n}  # eight of each
    rest = sorted(n for n in names if not any(c.shows(n) for c in CHARTS))
    groups = sorted({n.partition("/")[0] for n in rest})
    others = [
        Chart(ELSE, f"Also logged: {group}", tuple(n for n in rest if n.partition("/")[0] == group))
        for group in groups
    ]
    return [made for chart in (*CHARTS, *others) if (made := figure(chart, families))["data"]]


def figure(chart: Chart, families: Sequence[Family]) -> dict[str, Any]:
    """A plotly figure: colour distinguishes the metrics of one run, and runs where there are
    several; curves of a kind of actors have the colour of the pooled one and a dash. Runs of one
    family are a band from least to greatest, around their mean."""
    traces: list[dict[str, Any]] = []
    unit, several = "", len(families) > 1
    found = [dict(_curves(chart, family)) for family in families]
    names = sorted({name for its in found for name in its}, key=_shortest_first)
    pooled = list(dict.fromkeys(split_kind(name)[0] for name in names))
    kinds = ["", *sorted({split_kind(name)[1] for name in names} - {""})]
    for place, (family, its) in enumerate(zip(families, found)):
        for name, curves in its.items():
            i = names.index(name)  # the same dash in every run
            whole, kind = split_kind(name)
            metric = declared(name)
            unit = unit or (metric.unit if metric and metric.unit != "1" else "")
            label = f"{family.name}: {name}" if several else name
            color = COLORS[(place if several else pooled.index(whole)) % len(COLORS)]
            dash = DASHES[(i if several else kinds.index(kind)) % len(DASHES)]
            traces += _band(label, curves, color) if len(curves) > 1 else []
            stack = {"stackgroup": "all"} if chart.stacked and not several else {}
            traces.append(_trace(label, _mean(curves), {"color": color, "dash": dash}) | stack)
    return {
        "question": chart.question,
        "data": traces,
        "layout": {
            "title": {"text": chart.title},
            "xaxis": {"title": {"text": "step"}},
            "yaxis": {"title": {"text": unit}, **_scale(chart, traces)},
            "hovermode": "x unified",
        },
    }


Points = dict[float | int, float]  # step -> value


def _curves(chart: Chart, family: Family) -> Iterator[tuple[str, list[Points]]]:
    """(metric, its points in each run) of what the chart shows."""
    found: dict[str, list[Points]] = {}
    for run in family.runs:
        rows = [_with_rest(r) for r in run.rows] if chart.stacked else run.rows
        for name in {n for r in rows for n in r if chart.shows(n)}:
            points = {_x(name, r): v for r in rows if (v := r.get(name)) is not None}
            if points:
                found.setdefault(name, []).append(points)
    for name in sorted(found, key=_shortest_first):
        # a layer without any height would only lengthen the legend
        if not chart.stacked or any(y for points in found[name] for y in points.values()):
            yield name, found[name]


def _shortest_first(name: str) -> tuple[int, str]:
    """share_2 before share_16."""
    return len(name), name


def _mean(curves: Sequence[Points]) -> Points:
    """At every step that all of the runs have reached, and as far as the longest goes."""
    steps = sorted({x for points in curves for x in points})
    return {x: math.fsum(v) / len(v) for x in steps if (v := _at(curves, x))}


def _at(curves: Sequence[Points], x: float | int) -> list[float]:
    return [points[x] for points in curves if x in points]


def _band(label: str, curves: Sequence[Points], color: str) -> list[dict[str, Any]]:
    """Two lines without width, and the colour between them, where at least two runs are."""
    steps = [x for x in sorted({x for p in curves for x in p}) if len(_at(curves, x)) > 1]
    common = {
        "type": "scatter",
        "mode": "lines",
        "band": True,
        "legendgroup": label,
        "hoverinfo": "skip",
        "x": steps,
        "line": {"color": color, "width": 0},
    }
    low = {**common, "name": f"{label}, least", "y": [_short(min(_at(curves, x))) for x in steps]}
    high = {**common, "name": f"{label}, most", "y": [_short(max(_at(curves, x))) for x in steps]}
    return [low, {**high, "fill": "tonexty", "fillcolor": f"{color}33"}]


def _trace(label: str, points: Points, style: dict[str, str]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(points) < 40 else "lines",
        "name": label,
        "legendgroup": label,
        "x": list(points),
        "y": [_short(y) for y in points.values()],
        "line": {**style, "width": 1.6},
        "marker": {"size": 4},
    }


def _short(value: float | int) -> float | int:
    return value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")


def _scale(chart: Chart, traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A logarithmic axis where one is asked for and every value has a logarithm."""
    values = [y for trace in traces for y in trace["y"]]
    if not chart.log or not values or min(values) <= 0:
        return {"type": "linear"}
    # over many decades, labels of minor ticks would lie over each other
    ticks = {"dtick": 1} if max(values) > 30 * min(values) else {}
    return {"type": "log", "exponentformat": "e", **ticks}


def _x(name: str, row: Row) -> float | int:
    """The step of a value; an evaluation belongs to the version that was evaluated."""
    at = row.get("eval/policy_version") if name.startswith("eval/") else None
    return row["step"] if at is None else at  # type: ignore[return-value]


def _with_rest(row: Row) -> Row:
    """The row plus the unaccounted part of its step, so that the parts add up to the whole."""
    parts = [row.get(n) or 0.0 for n in ("time/wait_data_s", "time/learn_s", "time/publish_s")]
    whole = row.get("time/step_s")
    return row if whole is None else {**row, "rest_s": max(0.0, whole - sum(parts))}
