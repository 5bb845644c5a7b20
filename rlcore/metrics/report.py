"""report.html: one self-contained page with a run's curves, configuration and sample completions.

It opens without a network, works on a run that is still going on, and overlays several runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from rlcore.files import replace_file
from rlcore.metrics.cells import tasks as tasks_of
from rlcore.metrics.figures import figures
from rlcore.metrics.names import is_accuracy
from rlcore.metrics.rows import Row
from rlcore.metrics.run_folder import Judge, Run, read_run

HEADLINE = (
    "step",
    "reward/mean",
    "mismatch/kl_k3",
    "mismatch/ess",
    "staleness/mean",
    "time/total_s",
)
# Columns of the tables of samples, of training and of evaluations.
SAMPLE_COLUMNS = (
    "prompt_id",
    "prompt",
    "response",
    "reward",
    "score_status",
    "actor_kind",
    "versions",
    "status",
)
STYLE = """
body{font:14px system-ui,sans-serif;margin:2em;color:#111;background:#fff}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(480px,1fr));gap:12px}
.chart{border:1px solid #ddd;border-radius:6px;min-height:320px}
table{border-collapse:collapse;margin:1em 0}
td,th{border:1px solid #ddd;padding:3px 8px;text-align:left;vertical-align:top}
code{white-space:pre-wrap;font-size:12px}
.observed{display:block;color:#777}
pre{background:#f6f6f6;padding:1em;overflow:auto}
"""
DRAW = """
JSON.parse(document.getElementById('figures').textContent).forEach((f,i)=>
Plotly.newPlot('chart'+i,f.data,f.layout,{responsive:true,displaylogo:false}));
"""


def write_report(
    run_dirs: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    judge: Judge | None = None,
) -> Path:
    """Write the report of one run (default: RUN_DIR/report.html) or of several overlaid (default:
    report.html in the working directory, since it belongs to none of their folders).

    `judge` finds the warnings that are listed above the curves; None: none are. Raises UserError
    for a folder that holds no run.
    """
    folders = [Path(run_dirs)] if isinstance(run_dirs, str | Path) else [Path(d) for d in run_dirs]
    runs = [read_run(folder, judge) for folder in folders]
    beside = folders[0] if len(folders) == 1 else Path()
    target = beside / "report.html" if out is None else Path(out)
    replace_file(target, render(_distinct(runs)))
    return target


def render(runs: Sequence[Run]) -> str:
    """The whole page."""
    shown = figures(runs)
    divs = "".join(f'<div class="chart" id="chart{i}"></div>' for i in range(len(shown)))
    data = json.dumps(shown).replace("</", "<\\/")  # text must not close the script element
    title = escape(", ".join(r.name for r in runs))
    body = "".join(_section(run) for run in runs)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        # Inlined (4 MB), so that the page opens years later and without a network.
        f"<style>{STYLE}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><h1>{title}</h1>{_headline(runs)}{_warnings(runs)}"
        f'<div class="charts">{divs or "<p>No learner step is finished yet.</p>"}</div>{body}'
        f'<script id="figures" type="application/json">{data}</script>'
        f"<script>{DRAW}</script></body></html>\n"
    )


def _distinct(runs: list[Run]) -> list[Run]:
    """Runs of the same folder name are distinguished by their paths."""
    names = [r.name for r in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.folder)
    return runs


def _headline(runs: Sequence[Run]) -> str:
    """The latest figures of each run."""
    accuracies = {n for run in runs for r in run.rows for n in r if is_accuracy(n)}
    columns = [*HEADLINE, *sorted(accuracies)]
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    lines = [
        f"<td>{escape(run.name)}</td>" + "".join(f"<td>{_last(run.rows, c)}</td>" for c in columns)
        for run in runs
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><tr><th>run</th>{head}</tr>{body}</table>"


def _warnings(runs: Sequence[Run]) -> str:
    """What each run that was judged should be warned of."""
    shown = []
    for run in runs:
        if run.warnings is None:
            continue
        lines = "".join(f"<li>{escape(text)}</li>" for text in run.warnings)
        found = f"<ul>{lines}</ul>" if lines else "<p>None by the bounds of logging.warnings.</p>"
        shown.append(f"<h3>Warnings: {escape(run.name)}</h3>{found}")
    return "".join(shown)


def _last(rows: Iterable[Row], name: str) -> str:
    values = [v for r in rows if (v := r.get(name)) is not None]
    return f"{values[-1]:.4g}" if values else ""


def _section(run: Run) -> str:
    tasks = _task_table(run)
    samples = [
        f"<h3>Samples: {escape(name)}</h3>{_sample_table(records)}" for name, records in run.samples
    ]
    config = f"<summary>Configuration</summary><pre>{escape(run.config)}</pre>"
    shown = f"{tasks}{''.join(samples)}<details>{config}</details>"
    return f"<h2>{escape(run.name)}</h2>{shown}"


def _task_table(run: Run) -> str:
    """The training tasks of a run with several, each with its newest figures."""
    found: dict[str, dict[str, str]] = {}
    for row in run.rows:
        for task, its in tasks_of(row).items():
            shown = {name: f"{value:.4g}" for name, value in its.items() if value is not None}
            found.setdefault(task, {}).update(shown)
    if not found:
        return ""
    columns = list(dict.fromkeys(name for its in found.values() for name in its))
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    lines = "".join(
        f"<tr><td>{escape(task)}</td>"
        + "".join(f"<td>{escape(its.get(c, ''))}</td>" for c in columns)
        + "</tr>"
        for task, its in found.items()
    )
    return f"<h3>Tasks</h3><table><tr><th>task</th>{head}</tr>{lines}</table>"


def _sample_table(records: Sequence[dict[str, Any]]) -> str:
    columns = [c for c in SAMPLE_COLUMNS if any(c in r for r in records)]
    head = "".join(f"<th>{c}</th>" for c in columns)
    lines = ["".join(f"<td>{_sample_cell(r, c)}</td>" for c in columns) for r in records]
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _sample_cell(record: dict[str, Any], column: str) -> str:
    """One value; the response of several turns is shown turn by turn."""
    if column != "response" or "turns" not in record:
        return f"<code>{escape(str(record.get(column, '')))}</code>"
    shown = []
    for number, turn in enumerate(record["turns"], 1):
        reward = f", reward {turn['reward']:.4g}" if "reward" in turn else ""
        part = f", part {turn['part'] + 1}" if turn["part"] else ""
        observed = f'<code class="observed">{escape(turn["observed"])}</code>'
        said = f"<code>{escape(turn['said'])}</code>"
        shown.append(
            f"<details open><summary>turn {number}{part}{reward}</summary>"
            f"{observed if turn['observed'] else ''}{said}</details>"
        )
    return "".join(shown)
