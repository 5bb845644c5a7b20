"""report.html: one self-contained page of a run, or of several side by side.

It opens without a network, and can be made of a run that is still going on. Its style and its
program are in `assets/`.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlcore.files import replace_file
from rlcore.learner.specs import ENGINE_FACTS, LearnerSpec
from rlcore.metrics.digest import Digest, duration, number
from rlcore.metrics.digest import tasks as tasks_of
from rlcore.metrics.limit import limit_share, sentence
from rlcore.metrics.names import is_accuracy
from rlcore.metrics.rows import Row
from rlcore.metrics.run_folder import MAX_POINTS, Judge, Run, read_run, thin
from rlcore.report.answers import changes, samples
from rlcore.report.figures import ELSE, QUESTIONS, TIME, Family, figures, swimlanes


def header(run: Run) -> str:
    """The verdict with its reasons, the main figures, and the facts of one run."""
    kind, said = verdict(run)
    listed = run.verdict.warnings if run.verdict is not None else ()
    warned = "".join(f"<li>{escape(text)}</li>" for text in listed)
    facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in described(run).items())
    return (
        f'<article class="run"><h2>{escape(run.name)}</h2>'
        f'<p class="verdict {kind}">{escape(said)}</p>{_held(run) if kind == "well" else ""}'
        f"{f'<ul>{warned}</ul>' if warned else ''}{_tiles(run)}"
        f'<details class="facts"><summary>How it was run</summary><dl>{facts}</dl></details>'
        f"</article>"
    )


def _held(run: Run) -> str:
    found = run.verdict.kept if run.verdict is not None else ()
    listed = "".join(f"<li>{escape(text)}</li>" for text in found)
    summary = f"<summary>The {len(found)} things that were watched</summary>"
    return f'<details class="held">{summary}<ul>{listed}</ul></details>' if found else ""


TILES = ("reward/mean", "response_length/mean", "mismatch/kl_k3", "mismatch/ess", "staleness/mean")


def _tiles(run: Run) -> str:
    """A figure each: its newest value, its first one, and its course."""
    accuracies = sorted({n for row in run.rows for n in row if is_accuracy(n) and "@" not in n})
    names = [*accuracies[:2], *TILES]
    return f'<div class="tiles">{"".join(_tile(run, name) for name in names)}</div>'


def _tile(run: Run, name: str) -> str:
    values = [v for row in run.rows if (v := row.get(name)) is not None]
    if not values:
        return ""
    label = name.removeprefix("eval/")
    first = f"<small>from {number(values[0])}</small>" if len(values) > 1 else ""
    return (
        f'<div class="tile"><span class="name">{escape(label)}</span>'
        f'<span class="value">{number(values[-1])}</span>{first}{_spark(values)}</div>'
    )


SPARK_POINTS, SPARK_WIDTH, SPARK_HEIGHT = 60, 120, 28


def _spark(values: Sequence[float]) -> str:
    """A line without axes, next to its description in words."""
    if len(values) < 2:
        return ""
    stride = -(-len(values) // SPARK_POINTS)
    parts = [values[i : i + stride] for i in range(0, len(values), stride)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    across, up = SPARK_WIDTH / max(len(means) - 1, 1), (SPARK_HEIGHT - 4) / ((high - low) or 1.0)
    points = " ".join(f"{i * across:.1f},{2 + (high - v) * up:.1f}" for i, v in enumerate(means))
    size = f'viewBox="0 0 {SPARK_WIDTH} {SPARK_HEIGHT}" preserveAspectRatio="none"'
    return f'<svg class="spark" aria-hidden="true" {size}><polyline points="{points}"/></svg>'


def verdict(run: Run) -> tuple[str, str]:
    """("well" | "ill" | "unsure" | "failed", a sentence)."""
    steps = len(run.rows)
    if run.status.get("phase") == "failed":
        return "failed", f"The run failed after step {run.status.get('step', steps)}."
    if not steps:
        return "unsure", "No learner step is finished yet."
    if run.verdict is None:
        return "unsure", f"{steps} steps, without a verdict on warnings."
    return run.verdict.kind, run.verdict.said


def described(run: Run) -> dict[str, str]:
    """Describe the run, its settings and its result, each by a short name. Unknown ones are left
    out."""
    settings = run.settings
    facts = {
        "model": _model(settings.get("model")),
        "task": _task(settings),
        "actors": _actors(settings.get("actor")),
        "corrections": ", ".join(_parts(settings.get("correction"))) or "none",
        "algorithm": _algorithm(settings),
        "schedule": _schedule(settings.get("schedule")),
        "learner": _learner(settings.get("learner")),
        "seed": str(settings.get("seed", "")),
        **_done_with(run.about),
        "speed": sentence(limit_share(run.about, run.rows)),
        "so far": _progress(run),
    }
    if not settings:
        facts["corrections"] = ""
    return {name: text for name, text in facts.items() if text}


def _model(model: Any) -> str:
    if not isinstance(model, Mapping):
        return ""
    fresh = model.get("fresh")
    if model.get("path"):
        return str(model["path"])
    if isinstance(fresh, Mapping):
        layers, hidden = fresh.get("layers"), fresh.get("hidden_size")
        warm = (model.get("warmup") or {}).get("steps")
        return f"fresh, {layers} layers of {hidden}, {warm} warm-up steps"
    return ""


def _task(settings: Mapping[str, Any]) -> str:
    task = settings.get("task")
    if not isinstance(task, Mapping):
        return ""
    names = [str(task["name"])] if "name" in task else list(map(str, task))
    environment = (settings.get("environment") or {}).get("name")
    return ", ".join(names) + (f" in environment {environment}" if environment else "")


def _actors(actors: Any) -> str:
    if not isinstance(actors, Mapping):
        return ""
    return ", ".join(_actor(label, a) for label, a in actors.items() if isinstance(a, Mapping))


def _actor(label: str, actor: Mapping[str, Any]) -> str:
    kind, rounding = str(actor.get("kind", "")), actor.get("rounding")
    named = "" if kind == label else f" ({kind})"
    rounded = f", rounded to {rounding}: emulated" if rounding not in (None, "none") else ""
    return f"{actor.get('count', 1)} x {label}{named}, {actor.get('dtype', '')}{rounded}"


def _parts(correction: Any) -> list[str]:
    """Each correction with its settings that are plain values."""
    if not isinstance(correction, Mapping):
        return []
    return [
        name + (f" ({shown})" if (shown := _plain(spec)) else "")
        for name, spec in correction.items()
        if spec is not None
    ]


def _plain(spec: Any) -> str:
    if not isinstance(spec, Mapping):
        return ""
    return ", ".join(f"{k} {v}" for k, v in spec.items() if type(v) in (int, float, str))


def _algorithm(settings: Mapping[str, Any]) -> str:
    algorithm, rollout = settings.get("algorithm"), settings.get("rollout")
    if not isinstance(algorithm, Mapping):
        return ""
    samples = rollout.get("samples_per_prompt") if isinstance(rollout, Mapping) else None
    each = f", {samples} samples a prompt" if samples else ""
    return f"{algorithm.get('advantage')} advantage, {algorithm.get('loss')} loss{each}"


def _schedule(schedule: Any) -> str:
    if not isinstance(schedule, Mapping):
        return ""
    eta = schedule.get("max_staleness")
    kind = "synchronous" if eta == 0 else f"asynchronous, max_staleness {eta}"
    if schedule.get("lag") is not None:
        kind = f"every batch {schedule['lag']} steps old"
    every = schedule.get("steps_per_publish")
    return (
        f"{kind}, {schedule.get('steps')} steps of {schedule.get('groups_per_step')} groups, "
        f"a publication every {every} step{'s' if every != 1 else ''}"
    )


def _learner(learner: Any) -> str:
    if not isinstance(learner, Mapping):
        return ""
    ranks = learner.get("ranks", 1)
    lora = ", LoRA" if learner.get("lora") else ""
    plural = "s" if ranks != 1 else ""
    engine = learner.get("engine", "deepspeed")
    if engine in ENGINE_FACTS:
        spec = LearnerSpec.model_construct(**learner)
        engine = spec.facts.words(spec) or engine
    return f"{ranks} rank{plural}, {engine}, lr {learner.get('lr')}{lora}"


def _done_with(about: Mapping[str, Any]) -> dict[str, str]:
    machine = about.get("machine") or {}
    parts = [
        str(machine.get("system", "")),
        f"{machine['cores']} cores" if "cores" in machine else "",
        f"{machine['memory_gib']} GiB" if "memory_gib" in machine else "",
        ", ".join(machine.get("gpus") or ()) or ("no GPU" if machine else ""),
    ]
    versions = about.get("versions") or {}
    return {
        "machine": ", ".join(part for part in parts if part),
        "commit": str(about.get("commit") or ""),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def _progress(run: Run) -> str:
    if not run.rows:
        return ""
    digest = Digest()
    for row in run.rows:
        digest.add(row)
    took = run.rows[-1].get("time/total_s")
    last = [
        f"{figure.name} {figure.first} to {figure.with_interval}"
        for figure in digest.figures()
        if figure.first and (figure.name.startswith("eval ") or figure.name == "reward/mean")
    ]
    time = f" in {duration(took)}" if took is not None else ""
    return ", ".join([f"{number(run.rows[-1]['step'])} steps{time}", *last])


ASSETS = Path(__file__).resolve().parent / "assets"
# Bytes of the page: with style, program and configuration they stay far below 5 MB.
FIGURE_BYTES = 1_200_000
SAMPLE_BYTES = 600_000
CHANGE_BYTES = 400_000
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

    `judge` gives the verdict; None: there is none. Raises UserError for a folder that holds no run.
    """
    folders = [Path(run_dirs)] if isinstance(run_dirs, str | Path) else [Path(d) for d in run_dirs]
    runs = [read_run(folder, judge) for folder in folders]
    beside = folders[0] if len(folders) == 1 else Path()
    target = beside / "report.html" if out is None else Path(out)
    replace_file(target, render(distinct(runs)))
    return target


def render(runs: Sequence[Run]) -> str:
    """The whole page."""
    shown, found = _within_budget(runs), samples(runs, SAMPLE_BYTES)
    changed = changes(runs, CHANGE_BYTES)
    links = {"changed": "Answers"} if changed else {}
    links |= {_anchor(question): short for question, short in SHORT.items()}
    links |= {"samples": "Samples"} if found else {}
    table = _headline(runs) if len(runs) > 1 else ""
    body = (
        f'<section class="runs">{"".join(header(run) for run in runs)}</section>{table}'
        f"{_changed(changed)}{_charts(shown)}{_browser(found)}{_details(runs)}"
    )
    data = {"figures": shown, "records": found, "changes": changed}
    return framed(", ".join(r.name for r in runs), links, body, data)


def framed(
    title: str,
    links: Mapping[str, str],
    body: str,
    data: Mapping[str, Sequence[dict[str, Any]]] = types.MappingProxyType({}),
) -> str:
    """A page of this style around a `body`. `links`: its sections by anchor; `data`: what its
    program draws, the "figures", the "records" of samples and the "changes" of answers."""
    title = escape(title)
    style = (ASSETS / "report.css").read_text("utf-8")
    program = "".join((ASSETS / f"{name}.js").read_text("utf-8") for name in ("charts", "report"))
    given = {"figures": (), "records": (), "changes": (), **data}
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # A page without an icon asks for /favicon.ico.
        f'<link rel="icon" href="data:,"><title>{title}</title>'
        # Inlined, so that the page opens years later and without a network.
        f"<style>{style}</style></head>"
        f"<body>{_navigation(links, smooth=bool(given['figures']))}<main><h1>{title}</h1>{body}"
        f'</main><div id="tip" hidden></div>{"".join(_data(*pair) for pair in given.items())}'
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
    names = [_named(its, SEED) for its in found.values()]
    if len({*names}) < len(names):  # only their seeds tell them apart
        names = [_named(its, "$") for its in found.values()]
    return [
        Family(name, [Run(r.name, r.folder, thin(r.rows, stride), r.config) for r in its])
        for name, its in zip(names, found.values())
    ]


SEED = r"(^|[_,/-])seed[-=]?\d+"  # in a folder's name, as sweeps give them


def _named(runs: Sequence[Run], left_out: str) -> str:
    """A name of runs that differ by their seed alone: the first's without its seed."""
    first, bare = runs[0].name, re.sub(left_out, "", runs[0].name).strip("_,/-")
    if len(runs) == 1:
        return first
    if bare in ("", first):
        return f"{first} and {len(runs) - 1} more"
    return f"{bare}, {len(runs)} seeds"


def distinct(runs: list[Run]) -> list[Run]:
    """The runs by folder name; runs with equal folder names have their paths instead."""
    names = [r.name for r in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.folder)
    return runs


def _navigation(sections: Mapping[str, str], *, smooth: bool) -> str:
    links = "".join(_link(anchor, text) for anchor, text in sections.items())
    levels = {"0": "off", "0.6": "light", "0.9": "strong"}
    options = "".join(
        f'<option value="{weight}"{" selected" if weight == "0.6" else ""}>{name}</option>'
        for weight, name in levels.items()
    )
    return (
        f'<header class="bar"><nav aria-label="Sections">{links}</nav>'
        f'<label{"" if smooth else " hidden"}>Smoothing <select id="smooth">{options}</select>'
        "</label>"
        '<button id="whole" type="button" hidden>Whole run</button>'
        '<button id="theme" type="button">Dark</button></header>'
    )


# Names of the questions in the bar at the top.
SHORT = dict(zip(QUESTIONS, ("Learning", "Freshness", "Agreement", "Time", "All metrics")))


def _link(target: str, text: str) -> str:
    return f'<a href="#{target}">{escape(text)}</a>'


def _anchor(question: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in question.lower()).strip("-")


def _charts(shown: Sequence[dict[str, Any]]) -> str:
    """A section for each question; charts that answer none are folded."""
    sections = []
    for question in QUESTIONS:
        mine = [(i, f) for i, f in enumerate(shown) if f["question"] == question]
        wide = "".join(_chart(i, f) for i, f in mine if "lanes" in f)
        rest = "".join(_chart(i, f) for i, f in mine if "lanes" not in f)
        empty = '<p class="soft">Nothing was recorded.</p>'
        body = f'{wide}<div class="charts">{rest}</div>' if mine else empty
        if question == ELSE:
            body = f"<details><summary>{len(mine)} more charts</summary>{body}</details>"
        if question == TIME and not wide:
            body = f'<p class="soft">No timeline was recorded.</p>{body}'
        sections.append(f'<section id="{_anchor(question)}"><h2>{escape(question)}</h2>{body}')
    return "</section>".join(sections) + "</section>"


def _chart(place: int, found: dict[str, Any]) -> str:
    """The frame of a figure; the page's program draws into it."""
    notes = "".join(f"<div>{escape(line)}</div>" for line in found["notes"])
    below = f'<div class="soft below">{notes}</div>' if notes else ""
    drawn = (
        f'<div class="plot" id="chart{place}" role="img" tabindex="0" '
        f'aria-label="{escape(found["text"])}"></div><div class="legend"></div>'
    )
    kind = " wide" if "lanes" in found else "" if found["curves"] else " words"
    return (
        f'<figure class="chart{kind}"><figcaption>'
        f"{escape(found['title'])} <small>{escape(found['unit'])}</small></figcaption>"
        f"{'' if kind == ' words' else drawn}{below}</figure>"
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


def _changed(found: Sequence[dict[str, Any]]) -> str:
    """The frame of the answers before and after; the page's program fills it."""
    if not found:
        return ""
    labels = {str(i): each["label"] for i, each in enumerate(found)}
    return (
        '<section id="changed"><h2>What changed</h2><div class="controls">'
        f'<label>answers to {_select("which", labels)}</label><div id="kinds" role="group" '
        'aria-label="Kinds of changes"></div></div><p id="between" class="soft"></p>'
        '<div id="pairs"></div><button id="morepairs" type="button">More answers</button></section>'
    )


def _browser(found: Sequence[dict[str, Any]]) -> str:
    """The controls of the sample browser; the page's program fills the rest."""
    if not found:
        return ""
    orders = {
        "newest": "newest first",
        "worst": "worst mismatch first",
        "best": "highest reward first",
        "poorest": "lowest reward first",
    }
    colours = {"ratio": "ratio p_ref/p_inf", "age": "staleness", "none": "nothing"}
    views = {"groups": "groups of one prompt", "single": "single samples"}
    return (
        '<section id="samples"><h2>Samples</h2><div class="controls">'
        f"<label>show {_select('view', views)}</label>"
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
        heading = run.name if len(runs) > 1 else "Run"
        shown.append(f"<section><h2>{escape(heading)}</h2>{_task_table(run)}{fold}</section>")
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
