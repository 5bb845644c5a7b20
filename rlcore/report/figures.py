"""The charts of a report by the question that they answer, and the timeline of its processes, as
plain data that `assets/charts.js` draws."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.metrics.digest import number
from rlcore.metrics.intervals import wilson
from rlcore.metrics.metric import Metric
from rlcore.metrics.names import declared, is_accuracy, size_of, split_kind
from rlcore.metrics.rows import Row
from rlcore.metrics.run_folder import Run

LEARNER, PUBLICATIONS = "learner", "publications"
STEPS = 16  # at most
BARS = 600  # at most: an older step is left out before there are more
LEAST_S = 0.002  # shorter spans are not seen
# What a lane does, and the number of the colour that it has.
LANE_COLORS = {
    "training": 0,
    "p_ref": 5,
    "gathering weights": 4,
    "waiting for a batch": 3,
    "waiting for actors to load": 6,
    "waiting for an evaluation": 7,
    "checkpoint": 2,
    "between steps": 8,
    "publication": 9,
    "decoding": 1,
}
Bar = tuple[str, str, str, float, float, float]  # lane, kind, what it is, start, end, share


def swimlanes(run: Run) -> dict[str, Any] | None:
    """Bars [lane, kind, text, start, end, share] over seconds of training time, lanes and kinds by
    their places; None without a record."""
    bars, steps = _last(run.timeline)
    if not bars:
        return None
    lanes = sorted({lane for lane, *_ in bars}, key=_place)
    kinds = [kind for kind in LANE_COLORS if any(bar[1] == kind for bar in bars)]
    # an actor's heartbeats begin before the first of these steps
    start = min(b[3] for b in bars if b[0] == LEARNER or lanes[0] != LEARNER)
    end = max(b[4] for b in bars)
    said = _summary(bars, lanes, end - start)
    title = f"Who worked and who waited: {run.name}, {steps}"
    return {
        "question": TIME,
        "title": title,
        "unit": "seconds of training",
        "lanes": lanes,
        "kinds": [[kind, LANE_COLORS[kind]] for kind in kinds],
        "bars": [_drawn(bar, lanes, kinds) for bar in bars],
        "range": [round(start, 3), round(end, 3)],
        "notes": said,
        "text": f"{title}. {'. '.join(said)}.",
    }


def _drawn(bar: Bar, lanes: Sequence[str], kinds: Sequence[str]) -> list[Any]:
    lane, kind, what, start, end, share = bar
    worked = f", {share:.0%} of it" if kind == "decoding" else ""
    said = f"{what}, {end - start:.2f} s{worked}"
    spans = (round(start, 3), round(end, 3), round(share, 3))
    return [lanes.index(lane), kinds.index(kind), said, *spans]


def _last(lines: Sequence[dict[str, Any]]) -> tuple[list[Bar], str]:
    """The bars of the newest steps, and these steps."""
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


def _summary(bars: Sequence[Bar], lanes: Sequence[str], seconds: float) -> list[str]:
    """One sentence a lane on the use of its time."""
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


# Not charted: the x axis, or shown in the table above the charts.
NOT_CHARTED = {"step", "policy_version", "eval/policy_version", "metrics/nonfinite", "time/step_s"}
DIGITS = 5  # that a curve's values have
COLOURS = 10  # that the page has
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
        # An undeclared metric is matched as well, since users may log any.
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
    Chart(
        AGREE, "KL of an answer by steps in flight", ("step_bound/answer_kl", "step_bound/bound")
    ),
    Chart(AGREE, "Share of a step that the step bound left", ("step_bound/scale",)),
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
    Chart(AGREE, "Share of the mismatch that repeats", ("mismatch/fixed_share",)),
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
    """Every chart that has data, and charts of all other metrics, so that every logged metric is
    shown except most percentiles of eighths of answers. A chart that would repeat an earlier one
    becomes a note there."""
    names = {n for f in families for run in f.runs for r in run.rows for n in r} - NOT_CHARTED
    names -= {n for n in names if "/eighth_" in n and "/ratio_p5" not in n}  # eight of each
    rest = sorted(n for n in names if not any(c.shows(n) for c in CHARTS))
    groups = sorted({n.partition("/")[0] for n in rest})
    others = [
        Chart(ELSE, f"Also logged: {group}", tuple(n for n in rest if n.partition("/")[0] == group))
        for group in groups
    ]
    made = [figure(chart, families) for chart in (*CHARTS, *others)]
    return without_repeats([found for found in made if found["curves"] or found["notes"]])


def without_repeats(made: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out each figure of which every curve that changes was drawn before, all in one other
    figure, which says so."""
    kept: list[dict[str, Any]] = []
    drawn: dict[str, tuple[str, dict[str, Any]]] = {}  # points -> first name and figure
    for found in made:
        varied = [] if found["stacked"] else [c for c in found["curves"] if not _flat(c["y"])]
        before = [drawn.get(_points_of(curve)) for curve in varied]
        earlier = {id(b[1]): b[1] for b in before if b is not None}
        if varied and None not in before and len(earlier) == 1:
            same = [f"{c['name']} is {b[0]}" for c, b in zip(varied, before) if b is not None]
            (where,) = earlier.values()
            where["notes"].append(f"{found['title']} would show the same: {', '.join(same)}.")
            continue
        kept.append(found)
        for curve in varied:
            drawn.setdefault(_points_of(curve), (curve["name"], found))
    return kept


def _points_of(curve: dict[str, Any]) -> str:
    return f"{curve['x']} {curve['y']}"


def _flat(values: Sequence[float]) -> bool:
    return min(values) == max(values)


def figure(chart: Chart, families: Sequence[Family]) -> dict[str, Any]:
    """One chart: colour distinguishes the metrics of one run, and runs where there are several.
    Curves of a kind of actors have the colour of the pooled one and a dash. Runs of one family are
    a band from least to greatest, around their mean. A value that never changes is a note, in a
    chart of such values and among metrics that are only logged."""
    curves: list[dict[str, Any]] = []
    unit, several = "", len(families) > 1
    found = [dict(_curves(chart, family)) for family in families]
    names = sorted({name for its in found for name in its}, key=_shortest_first)
    pooled = list(dict.fromkeys(split_kind(name)[0] for name in names))
    kinds = ["", *sorted({split_kind(name)[1] for name in names} - {""})]
    for place, (family, its) in enumerate(zip(families, found)):
        for name, points in its.items():
            whole, kind = split_kind(name)
            metric = declared(name)
            unit = unit or (metric.unit if metric and metric.unit != "1" else "")
            label = f"{family.name}: {name}" if several else name
            color = place if several else pooled.index(whole)
            # the same in every run; of one run another one where the colours begin anew
            again = len(kinds) * (color // COLOURS)
            dash = names.index(name) if several else kinds.index(kind) + again
            curve = _curve(label, points, color, dash)
            if is_accuracy(name) and len(points) == 1:
                curve |= _evaluated(name, curve, family)
            curves.append(curve)
    stacked = chart.stacked and not several
    notes = []
    flat = [c for c in curves if len(c["y"]) > 1 and _flat(c["y"]) and not chart.stacked]
    if chart.question == ELSE or (chart.question != LEARNS and len(flat) == len(curves)):
        notes = [f"{c['name']} = {number(c['y'][0])} throughout" for c in flat]
        curves = [c for c in curves if c not in flat]
    return {
        "question": chart.question,
        "title": chart.title,
        "unit": unit,
        "stacked": stacked,
        "log": chart.log and all(y > 0 for c in curves for y in c["y"]),
        "curves": curves if stacked else _once(curves),
        "notes": notes,
        "text": _said(chart.title, unit, curves),
    }


def _once(curves: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Equal curves as one line with all of their names."""
    kept: dict[str, dict[str, Any]] = {}
    for curve in curves:
        first = kept.setdefault(_points_of(curve), curve)
        if first is not curve:
            first["also"] = [*first.get("also", []), curve["name"]]
    return list(kept.values())


SAID = 8  # curves that the words for a chart describe


def _said(title: str, unit: str, curves: Sequence[dict[str, Any]]) -> str:
    """A description of a chart in words, for screen readers."""
    said = [
        f"{c['name']} from {number(c['y'][0])} to {number(c['y'][-1])}, "
        f"least {number(min(c['y']))}, most {number(max(c['y']))}"
        for c in curves[:SAID]
    ]
    said += [f"and {len(curves) - SAID} more curves"] if len(curves) > SAID else []
    steps = [x for c in curves for x in c["x"]]
    over = f", steps {min(steps)} to {max(steps)}" if steps else ""
    return f"{title}{f' in {unit}' if unit else ''}{over}. {'; '.join(said)}."


Points = dict[float | int, float]  # step -> value


def _curves(chart: Chart, family: Family) -> Iterator[tuple[str, list[Points]]]:
    """(metric, its points in each run) of what the chart shows."""
    found: dict[str, list[Points]] = {}
    for run in family.runs:
        rows = [_with_rest(r) for r in run.rows] if chart.stacked else run.rows
        logged = {n for r in rows for n in r}
        for name in (n for n in logged if chart.shows(n)):
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
    """The mean at every step of the runs, up to the end of the longest."""
    steps = sorted({x for points in curves for x in points})
    return {x: math.fsum(v) / len(v) for x in steps if (v := _at(curves, x))}


def _at(curves: Sequence[Points], x: float | int) -> list[float]:
    return [points[x] for points in curves if x in points]


def _curve(label: str, runs: Sequence[Points], color: int, dash: int) -> dict[str, Any]:
    """The mean of the runs, and where at least two of them are, "band": steps, least, most."""
    points = _mean(runs)
    made = {
        "name": label,
        "color": color,
        "dash": dash,
        "x": list(points),
        "y": [_short(y) for y in points.values()],
    }
    if len(runs) > 1:
        steps = [x for x in points if len(_at(runs, x)) > 1]
        least = [_short(min(_at(runs, x))) for x in steps]
        made["band"] = [steps, least, [_short(max(_at(runs, x))) for x in steps]]
    return made


def _evaluated(name: str, curve: dict[str, Any], family: Family) -> dict[str, Any]:
    """The "band" of a held-out accuracy of one run: Wilson's interval of each evaluation's answers,
    where their effective number is known."""
    sizes = {_x(name, row): row.get(size_of(name)) for run in family.runs for row in run.rows}
    found = [(x, wilson(y, size)) for x, y in zip(curve["x"], curve["y"]) if (size := sizes.get(x))]
    ends = [[_short(end) for end in its] for its in zip(*((i.low, i.high) for _, i in found))]
    return {"band": [[x for x, _ in found], *ends]} if found else {}


def _short(value: float | int) -> float | int:
    return value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")


def _x(name: str, row: Row) -> float | int:
    """The step of a value; an evaluation belongs to the version that was evaluated."""
    at = row.get("eval/policy_version") if name.startswith("eval/") else None
    return row["step"] if at is None else at  # type: ignore[return-value]


def _with_rest(row: Row) -> Row:
    """The row plus the unaccounted part of its step, so that the parts add up to the whole."""
    parts = [row.get(n) or 0.0 for n in ("time/wait_data_s", "time/learn_s", "time/publish_s")]
    whole = row.get("time/step_s")
    return row if whole is None else {**row, "rest_s": max(0.0, whole - sum(parts))}
