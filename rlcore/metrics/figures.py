"""The charts of a report, as plotly figures in plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.metrics.names import Metric, declared
from rlcore.metrics.rows import Row
from rlcore.metrics.run_folder import Run

COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
# Not charted: the x axis, or shown in the table above the charts.
NOT_CHARTED = {"step", "policy_version", "eval/policy_version", "metrics/nonfinite", "time/step_s"}


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure: the metrics it shows, by name or by a declared family's template.

    Example: Chart("Reward", ("reward/mean", "reward_parts/<part>"))
    """

    title: str
    names: tuple[str, ...]
    stacked: bool = False
    log: bool = False

    def shows(self, name: str) -> bool:
        """Whether the metric belongs here."""
        # An undeclared metric is matched as well: users log what they like.
        return any(Metric(pattern, "", "").covers(name) for pattern in self.names)


def _each(template: str, *values: str) -> tuple[str, ...]:
    return tuple(template.format(value) for value in values)


CHARTS = (
    Chart("Reward", ("reward/mean", "reward/kept_mean", "reward_parts/<part>")),
    Chart("Reward by task", ("task/<task>/reward_mean",)),
    Chart("Groups of the batch by task", ("task/<task>/groups",), stacked=True),
    Chart("Tokens by task", ("task/<task>/token_share",), stacked=True),
    Chart("Problems by difficulty", _each("task/<task>/{}", "seen", "solved", "hopeless")),
    Chart("Held-out accuracy", _each("eval/<task>/{}", "greedy", "mean@<k>", "pass@<k>")),
    Chart("Response length", ("response_length/mean", "response_length/max")),
    Chart("Staleness", _each("staleness/{}", "mean", "max", "in_flight_mean", "in_buffer_mean")),
    Chart("Age of trained tokens", ("staleness/share_<age>",), stacked=True),
    Chart("Mismatch: KL(p_inf || p_ref)", ("mismatch/kl_k1", "mismatch/kl_k3")),
    Chart(
        "Mismatch: |log p_ref - log p_inf|",
        ("mismatch/abs_dlogp_mean", "mismatch/abs_dlogp_max"),
        log=True,
    ),
    Chart("Mismatch: effective sample size", ("mismatch/ess",)),
    Chart(
        "Mismatch: tokens affected",
        _each("mismatch/{}_share", "truncated", "masked", "veto", "outside"),
    ),
    Chart(
        "Corrections: share and weight",
        _each("correction/{}", "kept_share", "weight_mean", "zero_weight_share"),
    ),
    Chart("Corrections: their own figures", ("correction/<name>/<statistic>",)),
    Chart("Loss", ("loss/policy", "loss/kl", "loss/<part>")),
    Chart("Gradient norm", ("grad_norm",)),
    Chart("Entropy", ("entropy",)),
    Chart("Throughput", _each("throughput/{}_tokens_per_s", "rollout", "train")),
    Chart(
        "Time of a step",
        ("time/wait_data_s", "time/learn_s", "time/publish_s", "rest_s"),
        stacked=True,
    ),
    Chart("Buffer", ("buffer/groups", "buffer/in_flight")),
    Chart("Ledger", ("ledger/<count>",)),
)


def figures(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Every chart that has data, and one of all other metrics, so that nothing logged is hidden."""
    names = {n for run in runs for r in run.rows for n in r} - NOT_CHARTED
    rest = sorted(n for n in names if not any(c.shows(n) for c in CHARTS))
    families = sorted({n.partition("/")[0] for n in rest})
    others = [
        Chart(f"Also logged: {family}", tuple(n for n in rest if n.partition("/")[0] == family))
        for family in families
    ]
    return [made for chart in (*CHARTS, *others) if (made := figure(chart, runs))["data"]]


def figure(chart: Chart, runs: Sequence[Run]) -> dict[str, Any]:
    """A plotly figure: colour distinguishes the metrics of one run, and runs where there are
    several."""
    traces: list[dict[str, Any]] = []
    unit = ""
    for place, run in enumerate(runs):
        for i, (name, points) in enumerate(_curves(chart, run)):
            metric = declared(name)
            unit = unit or (metric.unit if metric else "")
            style = _style(i, place) if len(runs) > 1 else {"color": COLORS[i % 8], "dash": "solid"}
            label = name if len(runs) == 1 else f"{run.name}: {name}"
            stack = {"stackgroup": run.name} if chart.stacked else {}
            traces.append(_trace(label, points, style) | stack)
    return {
        "data": traces,
        "layout": {
            "title": {"text": chart.title, "font": {"size": 15}},
            "height": 320,
            "margin": {"l": 60, "r": 10, "t": 40, "b": 40},
            "xaxis": {"title": {"text": "step"}},
            "yaxis": {"title": {"text": unit}, "type": "log" if chart.log else "linear"},
            "legend": {"font": {"size": 10}, "orientation": "h", "y": -0.25},
            "hovermode": "x unified",
            "showlegend": True,
        },
    }


def _curves(chart: Chart, run: Run) -> Iterator[tuple[str, list[tuple[Any, Any]]]]:
    """(metric, its points) of what the chart shows of a run; short names first: share_2 before
    share_16."""
    rows = [_with_rest(r) for r in run.rows] if chart.stacked else run.rows
    names = {n for r in rows for n in r if chart.shows(n)}
    for name in sorted(names, key=lambda n: (len(n), n)):
        points = [(_x(name, r), r[name]) for r in rows if r.get(name) is not None]
        if points:
            yield name, points


def _style(curve: int, place: int) -> dict[str, str]:
    return {"color": COLORS[place % len(COLORS)], "dash": DASHES[curve % len(DASHES)]}


def _trace(label: str, points: list[tuple[Any, Any]], style: dict[str, str]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(points) < 40 else "lines",
        "name": label,
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "line": {**style, "width": 1.6},
        "marker": {"size": 4},
    }


def _x(name: str, row: Row) -> float | int | None:
    """The step of a value; an evaluation belongs to the version that was evaluated."""
    at = row.get("eval/policy_version") if name.startswith("eval/") else None
    return row["step"] if at is None else at


def _with_rest(row: Row) -> Row:
    """The row plus the unaccounted part of its step, so that the parts add up to the whole."""
    parts = [row.get(n) or 0.0 for n in ("time/wait_data_s", "time/learn_s", "time/publish_s")]
    whole = row.get("time/step_s")
    return row if whole is None else {**row, "rest_s": max(0.0, whole - sum(parts))}
