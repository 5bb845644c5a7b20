"""report.html: one self-contained page with a run's curves, configuration and sample completions.

It opens without a network, works on a run that is still going, and lays several runs over one another.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from rlcore.errors import UserError
from rlcore.metrics.names import Metric, combine, declared, is_accuracy
from rlcore.metrics.rows import Row, read_rows

MAX_POINTS = 1000  # points a curve; longer runs are thinned by each metric's own reduction
MAX_SAMPLES = 12
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure: the metrics it shows, by name or by a declared family's template."""

    title: str
    names: tuple[str, ...]
    stacked: bool = False
    log: bool = False

    def shows(self, name: str) -> bool:
        """Whether the metric belongs here."""
        return any(Metric(pattern, "", "").covers(name) for pattern in self.names)


CHARTS = (
    Chart("Reward", ("reward/mean", "reward/kept_mean", "reward_parts/<part>")),
    Chart("Held-out accuracy", ("eval/<task>/greedy", "eval/<task>/mean@<k>", "eval/<task>/pass@<k>")),
    Chart("Response length", ("response_length/mean", "response_length/max")),
    Chart("Staleness", ("staleness/mean", "staleness/max", "staleness/in_flight_mean", "staleness/in_buffer_mean")),
    Chart("Age of trained tokens", ("staleness/share_<age>",), stacked=True),
    Chart("Mismatch: KL(p_inf || p_ref)", ("mismatch/kl_k1", "mismatch/kl_k3")),
    Chart("Mismatch: |log p_ref - log p_inf|", ("mismatch/abs_dlogp_mean", "mismatch/abs_dlogp_max"), log=True),
    Chart("Mismatch: effective sample size", ("mismatch/ess",)),
    Chart(
        "Mismatch: tokens affected", tuple(f"mismatch/{s}_share" for s in ("truncated", "masked", "veto", "outside"))
    ),
    Chart(
        "Corrections: share and weight",
        tuple(f"correction/{s}" for s in ("kept_share", "weight_mean", "zero_weight_share")),
    ),
    Chart("Corrections: their own figures", ("correction/<name>/<statistic>",)),
    Chart("Loss", ("loss/policy", "loss/kl", "loss/<part>")),
    Chart("Gradient norm", ("grad_norm",)),
    Chart("Entropy", ("entropy",)),
    Chart("Throughput", ("throughput/rollout_tokens_per_s", "throughput/train_tokens_per_s")),
    Chart("Time of a step", ("time/wait_data_s", "time/learn_s", "time/publish_s", "rest_s"), stacked=True),
    Chart("Buffer", ("buffer/groups", "buffer/in_flight")),
    Chart("Ledger", ("ledger/<count>",)),
)


@dataclass(slots=True)
class Run:
    """What a run directory holds at this moment."""

    name: str
    folder: Path
    rows: list[Row]
    config: str
    samples: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)  # (file name, records)


def write_report(run_dirs: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report of one run (default: RUN_DIR/report.html) or of several overlaid (`out` required).

    Raises UserError for a folder that holds no run.
    """
    folders = [Path(run_dirs)] if isinstance(run_dirs, str | Path) else [Path(d) for d in run_dirs]
    if out is None and len(folders) != 1:
        raise UserError(f"A report of {len(folders)} runs belongs to none of them: name the file to write.")
    runs = [read_run(folder) for folder in folders]
    target = Path(out) if out is not None else folders[0] / "report.html"
    beside = target.with_name(target.name + ".tmp")
    beside.write_text(render(_distinct(runs)), encoding="utf-8")
    beside.replace(target)
    return target


def read_run(folder: Path) -> Run:
    """Everything a report shows of a run directory. Raises UserError if it is none."""
    if not (folder / "metrics.jsonl").exists() and not (folder / "config.yaml").exists():
        raise UserError(f"{folder} is not a run directory: it holds neither metrics.jsonl nor config.yaml.")
    config = folder / "config.yaml"
    return Run(
        name=folder.resolve().name,
        folder=folder,
        rows=thin(read_rows(folder / "metrics.jsonl")),
        config=config.read_text(encoding="utf-8") if config.exists() else "",
        samples=_samples(folder / "samples"),
    )


def thin(rows: list[Row], points: int = MAX_POINTS) -> list[Row]:
    """At most `points` rows: neighbours become one, each metric by its declared reduction, else its last value."""
    size = -(-len(rows) // points)
    if size <= 1:
        return rows
    chunks = (rows[i : i + size] for i in range(0, len(rows), size))
    return [
        {**{k: v for r in chunk for k, v in r.items() if declared(k) is None}, **combine([_declared(r) for r in chunk])}
        for chunk in chunks
    ]


def render(runs: Sequence[Run]) -> str:
    """The whole page."""
    figures = [f for chart in _charts(runs) if (f := figure(chart, runs))["data"]]
    divs = "".join(f'<div class="chart" id="chart{i}"></div>' for i in range(len(figures)))
    data = json.dumps(figures).replace("</", "<\\/")
    title = escape(", ".join(r.name for r in runs))
    body = "".join(_section(run) for run in runs)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"<script>{get_plotlyjs()}</script></head><body><h1>{title}</h1>{_headline(runs)}"
        f'<div class="charts">{divs or "<p>No learner step is finished yet.</p>"}</div>{body}'
        f'<script id="figures" type="application/json">{data}</script><script>{DRAW}</script></body></html>\n'
    )


def figure(chart: Chart, runs: Sequence[Run]) -> dict[str, Any]:
    """A plotly figure: colour tells metrics apart in one run, and runs where there are several."""
    traces: list[dict[str, Any]] = []
    for place, run in enumerate(runs):
        rows = [_with_rest(r) for r in run.rows] if chart.stacked else run.rows
        names = sorted({n for r in rows for n in r if chart.shows(n)}, key=lambda n: (len(n), n))  # share_2 before _16
        for i, name in enumerate(names):
            color, dash = (COLORS[i % 8], "solid") if len(runs) == 1 else (COLORS[place % 8], DASHES[i % 6])
            points = [(_x(name, r), r[name]) for r in rows if r.get(name) is not None]
            if not points:
                continue
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers" if len(points) < 40 else "lines",
                    "name": name if len(runs) == 1 else f"{run.name}: {name}",
                    "x": [x for x, _ in points],
                    "y": [y for _, y in points],
                    "line": {"color": color, "dash": dash, "width": 1.6},
                    "marker": {"size": 4},
                    **({"stackgroup": run.name} if chart.stacked else {}),
                }
            )
    unit = next((m.unit for t in traces if (m := declared(t["name"].rpartition(": ")[2]))), "")
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


def _charts(runs: Sequence[Run]) -> list[Chart]:
    """The fixed charts, and one of what no chart shows: nothing that was logged is hidden."""
    skipped = {"step", "policy_version", "eval/policy_version", "metrics/nonfinite", "time/step_s"}
    names = {n for run in runs for r in run.rows for n in r} - skipped
    rest = sorted(n for n in names if not any(c.shows(n) for c in CHARTS))
    families = sorted({n.partition("/")[0] for n in rest})
    return [
        *CHARTS,
        *(Chart(f"Also logged: {f}", tuple(n for n in rest if n.partition("/")[0] == f)) for f in families),
    ]


def _x(name: str, row: Row) -> float | int | None:
    """The step of a value; an evaluation belongs to the version it was made with."""
    at = row.get("eval/policy_version") if name.startswith("eval/") else None
    return row["step"] if at is None else at


def _with_rest(row: Row) -> Row:
    parts = [row.get(n) or 0.0 for n in ("time/wait_data_s", "time/learn_s", "time/publish_s")]
    whole = row.get("time/step_s")
    return row if whole is None else {**row, "rest_s": max(0.0, whole - sum(parts))}


def _declared(row: Row) -> Row:
    return {k: v for k, v in row.items() if declared(k) is not None}


def _distinct(runs: list[Run]) -> list[Run]:
    """Runs of the same folder name are told apart by their paths."""
    names = [r.name for r in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.folder)
    return runs


def _samples(folder: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    """The newest training samples and the newest of each evaluation."""
    newest: dict[str, Path] = {}
    for file in sorted(folder.glob("*.jsonl")):
        kind, _, rest = file.stem.partition("_")
        newest[f"{kind} {rest.partition('_')[2]}"] = file
    return [(f.stem, _records(f)[:MAX_SAMPLES]) for f in newest.values()]


def _records(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    return [json.loads(line) for line in lines if line.strip()]


def _headline(runs: Sequence[Run]) -> str:
    """Where each run stands, in numbers."""
    shown = ("step", "reward/mean", "mismatch/kl_k3", "mismatch/ess", "staleness/mean", "time/total_s")
    columns = [*shown, *sorted({n for run in runs for r in run.rows for n in r if is_accuracy(n)})]
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    lines = "".join(
        f"<tr><td>{escape(run.name)}</td>" + "".join(f"<td>{_last(run.rows, c)}</td>" for c in columns) + "</tr>"
        for run in runs
    )
    return f"<table><tr><th>run</th>{head}</tr>{lines}</table>"


def _last(rows: Iterable[Row], name: str) -> str:
    values = [v for r in rows if (v := r.get(name)) is not None]
    return f"{values[-1]:.4g}" if values else ""


def _section(run: Run) -> str:
    parts = [f"<h2>{escape(run.name)}</h2>"]
    for name, records in run.samples:
        parts.append(f"<h3>Samples: {escape(name)}</h3>{_sample_table(records)}")
    parts.append(f"<details><summary>Configuration</summary><pre>{escape(run.config)}</pre></details>")
    return "".join(parts)


def _sample_table(records: Sequence[dict[str, Any]]) -> str:
    columns = [
        c for c in ("prompt_id", "prompt", "response", "reward", "score_status", "actor_kind", "versions", "status")
    ]
    columns = [c for c in columns if any(c in r for r in records)]
    head = "".join(f"<th>{c}</th>" for c in columns)
    lines = "".join(
        "<tr>" + "".join(f"<td><code>{escape(str(r.get(c, '')))}</code></td>" for c in columns) + "</tr>"
        for r in records
    )
    return f"<table><tr>{head}</tr>{lines}</table>"


STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;color:#111;background:#fff}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(480px,1fr));gap:12px}"
    ".chart{border:1px solid #ddd;border-radius:6px;min-height:320px}"
    "table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid #ddd;padding:3px 8px;text-align:left;"
    "vertical-align:top}code{white-space:pre-wrap;font-size:12px}pre{background:#f6f6f6;padding:1em;overflow:auto}"
)
DRAW = (
    "JSON.parse(document.getElementById('figures').textContent).forEach((f,i)=>"
    "Plotly.newPlot('chart'+i,f.data,f.layout,{responsive:true,displaylogo:false}));"
)
