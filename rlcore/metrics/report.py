"""report.html: one self-contained page of a run, or of several side by side.

It opens without a network and works on a run that is still going on. Its style and its program are
in `assets/`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from rlcore.files import replace_file
from rlcore.metrics.cells import tasks as tasks_of
from rlcore.metrics.figures import ELSE, QUESTIONS, TIME, Family, figures
from rlcore.metrics.names import is_accuracy
from rlcore.metrics.report_header import header
from rlcore.metrics.report_samples import samples
from rlcore.metrics.rows import Row
from rlcore.metrics.run_folder import MAX_POINTS, Judge, Run, read_run, thin
from rlcore.metrics.swimlanes import swimlanes

ASSETS = Path(__file__).resolve().parent / "assets"
# Of the page, besides plotly's 4.8 MB: together they stay under 6 MB.
FIGURE_BYTES = 550_000
SAMPLE_BYTES = 350_000
LEAST_POINTS = 50
TIMELINES = 4  # runs whose timeline is shown
CONFIG_CHARS = 40_000
# Keys that do not make a run another experiment.
SEED_KEYS = {"seed", "run_dir", "resume"}
HEADLINE = (
    "step",
    "reward/mean",
    "mismatch/kl_k3",
    "mismatch/ess",
    "staleness/mean",
    "time/total_s",
)


def write_report(
    run_dirs: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    judge: Judge | None = None,
) -> Path:
    """Write the report of one run (default: RUN_DIR/report.html) or of several together (default:
    report.html in the working directory, since it belongs to none of their folders).

    `judge` finds the warnings that the verdict is made of; None: there is no verdict. Raises
    UserError for a folder that holds no run.
    """
    folders = [Path(run_dirs)] if isinstance(run_dirs, str | Path) else [Path(d) for d in run_dirs]
    runs = [read_run(folder, judge) for folder in folders]
    beside = folders[0] if len(folders) == 1 else Path()
    target = beside / "report.html" if out is None else Path(out)
    replace_file(target, render(_distinct(runs)))
    return target


def render(runs: Sequence[Run]) -> str:
    """The whole page."""
    title = escape(", ".join(r.name for r in runs))
    shown = _within_budget(runs)
    style, program = ((ASSETS / f"report.{kind}").read_text("utf-8") for kind in ("css", "js"))
    found = samples(runs, SAMPLE_BYTES)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # A page without an icon asks for /favicon.ico.
        f'<link rel="icon" href="data:,"><title>{title}</title>'
        # Inlined, so that the page opens years later and without a network.
        f"<style>{style}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><h1>{title}</h1>{_navigation(bool(found))}"
        f'<section class="runs">{"".join(header(run) for run in runs)}</section>'
        f"{_headline(runs)}{_charts(shown)}{_browser(found)}{_details(runs)}"
        f"{_data('figures', shown)}{_data('records', found)}"
        f"<script>{program}</script></body></html>\n"
    )


def _data(name: str, value: Any) -> str:
    # text must not close the script element, nor open a comment in it
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script id="{name}" type="application/json">{text}</script>'


def _within_budget(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The figures, with as many points as the page may have."""
    lanes = [lane for run in runs[:TIMELINES] if (lane := swimlanes(run)) is not None]
    points = MAX_POINTS
    while True:
        # one stride for all, so that curves of one family have the same steps
        stride = max((-(-len(run.rows) // points) for run in runs), default=1)
        made = figures(families(runs, stride))
        if len(json.dumps(made)) <= FIGURE_BYTES or points <= LEAST_POINTS:
            return made + lanes
        points //= 2


def families(runs: Sequence[Run], stride: int) -> list[Family]:
    """Runs that differ by their seed alone, together; `stride` rows of each become one."""
    found: dict[str, list[Run]] = {}
    for place, run in enumerate(runs):
        settings = {k: v for k, v in run.settings.items() if k not in SEED_KEYS}
        key = json.dumps(settings, sort_keys=True, default=str) if settings else str(place)
        found.setdefault(key, []).append(run)
    return [
        Family(
            its[0].name if len(its) == 1 else f"{its[0].name} and {len(its) - 1} more",
            [Run(r.name, r.folder, thin(r.rows, stride), r.config) for r in its],
        )
        for its in found.values()
    ]


def _distinct(runs: list[Run]) -> list[Run]:
    """Runs of the same folder name are distinguished by their paths."""
    names = [r.name for r in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.folder)
    return runs


def _navigation(with_samples: bool) -> str:
    links = [f'<a href="#{_anchor(q)}">{escape(q)}</a>' for q in QUESTIONS]
    links += ['<a href="#samples">Samples</a>'] if with_samples else []
    smooth = (
        '<label>Smoothing <select id="smooth"><option value="0">off</option>'
        '<option value="0.7">light</option><option value="0.95">strong</option></select></label>'
    )
    return (
        f'<nav>{"".join(links)}<span class="grow"></span>{smooth}'
        '<button id="theme" type="button">Dark</button></nav>'
    )


def _anchor(question: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in question.lower()).strip("-")


def _charts(shown: Sequence[dict[str, Any]]) -> str:
    """A section for each question; what answers none is folded away."""
    sections = []
    for question in QUESTIONS:
        mine = [(i, f) for i, f in enumerate(shown) if f["question"] == question]
        wide = "".join(_chart(i, f) for i, f in mine if f.get("wide"))
        rest = "".join(_chart(i, f) for i, f in mine if not f.get("wide"))
        empty = "<p>Nothing was recorded.</p>"
        body = f'{wide}<div class="charts">{rest}</div>' if mine else empty
        if question == ELSE:
            body = f"<details><summary>{len(mine)} more charts</summary>{body}</details>"
        if question == TIME and not wide:
            body = f'<p class="soft">No timeline was recorded.</p>{body}'
        sections.append(f'<section id="{_anchor(question)}"><h2>{escape(question)}</h2>{body}')
    return "</section>".join(sections) + "</section>"


def _chart(place: int, figure: dict[str, Any]) -> str:
    layout = figure["layout"]
    unit, title = layout["yaxis"]["title"]["text"], layout["title"]["text"]
    below = "".join(f"<div>{escape(line)}</div>" for line in figure.get("below", ()))
    wide = " wide" if figure.get("wide") else ""
    return (
        f'<figure class="chart{wide}"><figcaption>{escape(title)} <small>{escape(unit)}</small>'
        f'</figcaption><div class="plot" id="chart{place}"></div><div class="legend"></div>'
        f'<div class="soft below">{below}</div></figure>'
    )


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
    return f'<div class="scroll"><table><tr><th>run</th>{head}</tr>{body}</table></div>'


def _last(rows: Sequence[Row], name: str) -> str:
    values = [v for r in rows if (v := r.get(name)) is not None]
    return f"{values[-1]:.4g}" if values else ""


def _browser(found: Sequence[dict[str, Any]]) -> str:
    """The controls of the sample browser; the page's program fills the rest."""
    if not found:
        return ""
    orders = {
        "worst": "worst mismatch first",
        "newest": "newest first",
        "best": "highest reward first",
        "poorest": "lowest reward first",
    }
    colours = {"ratio": "ratio p_ref/p_inf", "age": "staleness", "none": "nothing"}
    return (
        '<section id="samples"><h2>Samples</h2><div class="controls">'
        '<label>of <select id="kind"><option value="all">all</option></select></label>'
        f"<label>order {_select('order', orders)}</label>"
        f"<label>colour by {_select('colour', colours)}</label>"
        '<label>reward from <input id="least" type="number" step="any"></label>'
        '<label>to <input id="most" type="number" step="any"></label>'
        '<span id="count" class="soft"></span></div>'
        '<p id="key" class="soft"><span id="low"></span> <span class="scale"></span> '
        '<span id="high"></span></p><div id="cards"></div>'
        '<button id="more" type="button">More samples</button></section>'
    )


def _select(name: str, options: dict[str, str]) -> str:
    listed = "".join(f'<option value="{v}">{escape(text)}</option>' for v, text in options.items())
    return f'<select id="{name}">{listed}</select>'


def _details(runs: Sequence[Run]) -> str:
    shown = []
    for run in runs:
        config = escape(run.config[:CONFIG_CHARS])
        fold = f"<details><summary>Configuration</summary><pre>{config}</pre></details>"
        shown.append(f"<h2>{escape(run.name)}</h2>{_task_table(run)}{fold}")
    return "".join(shown)


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
    table = f"<table><tr><th>task</th>{head}</tr>{lines}</table>"
    return f'<h3>Tasks</h3><div class="scroll">{table}</div>'
