"""Writes the parts of docs/ that follow from the code: the configuration reference, the table of
metrics, and the keys of every correction. `python docs/generate.py`; a test compares."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import fill

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

from gallery import curves_of_all, pictures
from pydantic import BaseModel

from benchmarks.status import PLACES, lines
from rlcore.advisor.planner.gpus import GPUS, SHAPES, EngineShape, actor_rates, learner_rates
from rlcore.config.combinations import PROVEN, REFUSED, WAYS, refused, sentence
from rlcore.config.groups import COMMAND_LINES, groups
from rlcore.config.help_settings import about, kind_of, meaning_of, written_default
from rlcore.config.schema import (
    BESIDE,
    RunConfig,
    shipped,
)
from rlcore.config.sentences import sections
from rlcore.corrections.decisions import regimes
from rlcore.corrections.specs import CORRECTIONS
from rlcore.extras.foreign_keys import ENTRIES, SOURCES
from rlcore.metrics.metric import Metric
from rlcore.metrics.names import METRICS
from rlcore.registry import resolve

STUDIES = "../benchmarks/results/evidence"  # from docs/
HEADING = {
    "model": "The starting model: [Use rlcore](using.md#your-own-model-data-and-grader).",
    "task": "Problems and graders: [Data, tasks and graders](tasks.md), "
    "[Several tasks](mixtures.md), [Further rewards](rewards.md).",
    "environment": "Episodes of several turns: [Environments](environments.md).",
    "actor": "Engines that sample: [Cheap actors](cheap-actors.md).",
    "rollout": "What is sampled of each prompt.",
    "correction": "[Corrections](corrections/index.md).",
    "algorithm": "[Policy losses and advantages](losses.md).",
    "schedule": "[Schedules](schedules.md).",
    "learner": "What trains: [GPUs and many nodes](scaling.md).",
    "critic": "A model of values beside the policy: [PPO with a critic](critic.md).",
    "teacher": "A policy that the trained one is led to: [Distillation](distillation.md).",
    "cluster": "Processes and what travels between them: [GPUs and many nodes](scaling.md), "
    "[Resume and faults](faults.md).",
    "evaluation": "Held-out prompts.",
    "checkpoint": "[Checkpoints](faults.md#checkpoints).",
    "logging": "[Monitoring](monitoring.md).",
}


def configuration() -> str:
    """docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "Every key, from the schema; made by `python docs/generate.py`. `rlcore train --help`",
        "lists groups, options, experiments and keys by name, `rlcore train --help algorithm`",
        "prints one group with defaults and meanings. LABEL is a name that the run gives, such as",
        "`bf16` of the selected actor. A value is given as `key=value`, a group as `group=option`,",
        "several corrections, actors or tasks as a list. `rlcore completion bash install=true` (or",
        "`zsh`) makes the shell complete commands, keys and options. Each key has its default, and",
        "its type or choices where the default does not show them; [s] is a unit.",
    ]
    top = [n for n, i in RunConfig.model_fields.items() if not list(sections(i.annotation))]
    seen: dict[str, type[BaseModel]] = {}
    lines += ["", "## The run", "", *_keys(RunConfig, "", top)]
    for name, info in RunConfig.model_fields.items():
        found = list(sections(info.annotation))
        if not found:
            continue
        lines += ["", f"## {name}", "", HEADING[name]]
        for model, labelled in found:
            lines += _section(model, f"{name}.{'LABEL.' if labelled else ''}", seen)
    return "\n".join(lines) + "\n"


def _section(
    model: type[BaseModel], prefix: str, seen: dict[str, type[BaseModel]]
) -> Iterator[str]:
    """The keys of a specification, and of those in it; keys that stand elsewhere too, by name."""
    title = prefix.rstrip(".")
    if model is shipped() and title != "correction":
        yield from ["", f"### {title}", "", "The keys of `correction`."]
        return
    same = next((earlier for earlier, other in seen.items() if other is model), None)
    if same:
        yield from ["", f"### {title}", "", f"The keys of `{same}`."]
        return
    plain = [n for n, info in model.model_fields.items() if not list(sections(info.annotation))]
    other, shared = _shared(model, plain, seen)
    listed = [name for name in plain if name not in shared]
    if plain:
        yield from ["", *([f"### {title}", ""] if "." in title else [])]
    if shared:
        yield from [f"As in `{other}`: {', '.join(f'`{name}`' for name in shared)}.", ""]
    yield from _keys(model, prefix, listed)
    seen[title] = model
    for name, info in model.model_fields.items():
        for inner, labelled in sections(info.annotation):
            yield from _section(inner, f"{prefix}{name}.{'LABEL.' if labelled else ''}", seen)


def _shared(
    model: type[BaseModel], names: list[str], seen: dict[str, type[BaseModel]]
) -> tuple[str, list[str]]:
    """The earlier section with the most equal keys, at least three, and these keys."""
    found = {
        title: [name for name in names if _same(model, other, name)]
        for title, other in seen.items()
    }
    title = max(found, key=lambda t: len(found[t]), default="")
    return (title, found[title]) if title and len(found[title]) >= 3 else ("", [])


def _same(model: type[BaseModel], other: type[BaseModel], name: str) -> bool:
    one, two = model.model_fields[name], other.model_fields.get(name)
    return two is not None and (one.default, meaning_of(one)) == (two.default, meaning_of(two))


def _keys(model: type[BaseModel], prefix: str, names: list[str]) -> Iterator[str]:
    """An item for each key: as it is written with its default, its type unless the default shows
    it, its meaning."""
    for name in names:
        info = model.model_fields[name]
        key, default = f"{prefix}{name}", written_default(info)
        kind = kind_of(key, info)
        if default is None:
            yield _item(f"- `{key}` (`{kind}`, required): {_plain(meaning_of(info))}")
            continue
        told = kind in ("int", "float", "bool", "str")
        form = "" if told else f" (`{kind.removesuffix('|null') if default == 'null' else kind}`)"
        yield _item(f"- `{key}={default.strip(chr(34))}`{form}: {_plain(meaning_of(info))}")


def _item(text: str) -> str:
    return fill(text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _plain(text: str) -> str:
    return text if "`" in text else text.replace("<", "&lt;").replace("*", "\\*")


def _cell(text: str) -> str:
    escaped = text.replace("|", "\\|")
    return escaped if "`" in text else escaped.replace("<", "&lt;").replace("*", "\\*")


def metrics() -> str:
    """The lists of docs/metrics.md, one for each first segment of the names."""
    found: dict[str, dict[str, tuple[Metric, list[str]]]] = {}
    for metric in METRICS:
        stem = re.sub(r"_p\d+$|(?<=/)(?:greedy|sampled)(?=_)", "_p<q>", metric.name)
        family = found.setdefault(_group(metric.name), {})
        family.setdefault(stem, (metric, []))[1].append(metric.name)
    lines = []
    for group, families in found.items():
        lines += ["", f"## {group}", ""]
        lines += [_described(metric, names) for metric, names in families.values()]
    return "\n".join([*lines[1:], ""])


def _described(metric: Metric, names: list[str]) -> str:
    """The item of a metric, and of those that differ from it by a percentile alone."""
    written = f"`{names[0]}`" + "".join(f", `{n.rpartition('/')[2]}`" for n in names[1:])
    unit = "" if metric.unit == "1" else f" [{metric.unit}]"
    meaning = metric.meaning
    if len(names) > 1:
        meaning = re.sub(r"percentile 1\b", "percentiles", meaning).replace("_p1 ", "_p<q> ")
        meaning = meaning.replace("greedy answers", "greedy or sampled answers")
    details = " (details)" if metric.detail else ""
    text = f"- {written}{unit}{details}: {_plain(meaning)}"
    if metric.healthy:
        text += f". Healthy: {_plain(metric.healthy)}"
    return _item(text + (f". If not: {_plain(metric.otherwise)}" if metric.otherwise else ""))


def _group(name: str) -> str:
    first, slash, _ = name.partition("/")
    return {"reward_parts": "reward"}.get(first, first) if slash else "Single metrics"


def foreign_keys() -> str:
    """The table of docs/coming-from.md."""
    lines = ["| rlcore | verl | TRL | OpenRLHF | SkyRL | prime-rl | |", "| --- |" + " --- |" * 6]
    for entry in ENTRIES:
        names = (f"`{name}`" if name else "" for name in map(entry.of, SOURCES))
        lines.append(f"| `{entry.ours}` | " + " | ".join([*names, _cell(entry.note)]) + " |")
    return "\n".join(lines) + "\n"


def experiments() -> str:
    """The tables of docs/experiments.md: those with a file, and those that are a command line."""
    lines = ["| experiment | content |", "| --- | --- |"]
    for name, file in groups()["experiment"].items():
        lines.append(f"| `{name}` | {_cell(about(file))} |")
    lines += ["", "## Experiments that are a command line", ""]
    lines += ["| command line | content | formerly |", "| --- | --- | --- |"]
    for name, (words, content) in COMMAND_LINES.items():
        lines.append(f"| `rlcore train {words}` | {_cell(content)} | `{name}` |")
    return "\n".join(lines) + "\n"


def correction_keys(name: str) -> str:
    """The keys on a correction's page."""
    spec = resolve(CORRECTIONS, name, key="correction")
    return "\n".join(_keys(spec, f"correction.{name}.", list(spec.model_fields))) + "\n"


def regime_table() -> str:
    """The rows of docs/evidence.md."""
    lines = ["| regime and figures | remedy | effect, and where it was measured | status |"]
    lines.append(f"|{' --- |' * 4}")
    for entry in regimes():
        bounds = "; ".join(_bounds(name, *ends) for name, ends in entry.when.items())
        page = f"[{entry.measured}]({STUDIES}/{entry.source}.md)"
        figures = f"{entry.regime}: {bounds}" if bounds else f"{entry.regime}: anything else"
        remedy = re.sub(
            r"[\w.]+=(?:\{[^}]*\}|\[[^]]*\]|\w+)|\blearner\.\w+", r"`\g<0>`", entry.remedy
        )
        lines.append(f"| {figures} | {remedy} | {entry.effect} ({page}) | {entry.status} |")
    return (
        "\n".join(lines).replace("T*m", "T\\*m").replace("N*", "[N\\*](glossary.md#n-star)") + "\n"
    )


def combined() -> str:
    """docs/combinations.md."""
    lines = [
        "# What goes together",
        "",
        "Made by `python docs/generate.py` from `rlcore/config/combinations.py`, by which a run is",
        "refused, too. Each way in which a learner divides, holds, computes or extends the policy",
        "changes what the others rely on. Two of them are accepted where a test has shown the",
        "pair, and else refused. The ways are:",
        "",
        *fill(f"{', '.join(WAYS)}.", 100, break_on_hyphens=False).split("\n"),
        "",
        "## Shown by a test",
        "",
        "| feature | with | test |",
        "| --- | --- | --- |",
        *(f"| {row.a} | {row.b} | `{row.test}` |" for row in PROVEN),
        "",
        "## Refused for a reason",
        "",
        "| feature | with | because |",
        "| --- | --- | --- |",
    ]
    for row in (row for row in REFUSED if row.why):
        said = sentence(row, "the first", "the second").removeprefix("the first ")
        lines.append(f"| {row.a} | {row.b} | {_cell(said)} |")
    lines += ["", "## Refused because no test has shown it", ""]
    without: dict[str, list[str]] = {}
    for row in (row for row in refused() if not row.why):
        without.setdefault(row.a, []).append(row.b)
    lines += ["| feature | not with |", "| --- | --- |"]
    lines += [f"| {name} | {', '.join(others)} |" for name, others in without.items()]
    return "\n".join(lines) + "\n"


def status() -> str:
    """docs/status.md, from what benchmarks recorded (benchmarks/status.py)."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for line in lines():
        found.setdefault(line["what"], {})[line["where"]] = line
    ran = {what: by for what, by in found.items() if "nowhere" not in by}
    text = [STATUS, f"| | {' | '.join(PLACES.values())} |", "| --- |" + " --- |" * len(PLACES)]
    text += [
        f"| {what} | {' | '.join(_shown(by.get(place)) for place in PLACES)} |"
        for what, by in ran.items()
    ]
    text += ["", "## Not run anywhere yet", "", "| | what would show it |", "| --- | --- |"]
    text += [
        f"| {what} | {_shown(by['nowhere'])} |" for what, by in found.items() if what not in ran
    ]
    return "\n".join(text) + "\n"


def _shown(line: dict[str, str] | None) -> str:
    if line is None:
        return ""
    by = f"`{line['by']}`" if "/" in line["by"] or line["by"].startswith("make") else line["by"]
    shown = f"[{by}](../benchmarks/results/{line['page']})" if line["page"] else by
    said = [line.get("outcome", "passed").removeprefix("passed"), line.get("date", "")]
    return " ".join([shown, *filter(None, said)])


STATUS = """# Status: what has run where

This page is the only one that says where a feature has run. `python docs/generate.py` makes it from
`benchmarks/results/status.jsonl`, to which benchmarks, GPU checks and the slow and nightly tests
write (`benchmarks/status.py`). The date is the last run's; older records have none. An empty
cell means that nobody has tried the feature there.

- **Two CPU cores**: the tests of `make test`, and the scripts below, with the real vLLM, Ray and
  DeepSpeed. FP8 and INT formats are emulated there: weights are rounded, and arithmetic is not.
- **One H100**: single measurements, most of them of one part at a time, with the locked versions.
- **Real Slurm**: three Slurm nodes that share one machine without GPUs.
"""
FLEETS = (1, 8, 64)  # H100
CONTEXT = 4096.0  # tokens of a request, on average


def fleet_table() -> str:
    """The table of docs/scaling.md: what H100 would do with each model, by arithmetic."""
    card = GPUS["h100"]
    lines = [
        "| model | H100 | engines | learner ranks | states of a rank, GiB | trained, tokens/s "
        "| sampled, tokens/s | weights to the engines, s |",
        f"|{' --- |' * 8}",
    ]
    for name, shape in SHAPES.items():
        for count in FLEETS:
            ranks = max(1, count // 2)
            share = 2 if shape.parameters > 20e9 else 1  # GPUs of an engine
            row = [name, f"{count}", "one, in turns" if count == 1 else f"{count // 2 // share}"]
            # bfloat16 weights and float32 gradients, weights and two moments: 18 bytes an entry
            states = 18 * shape.parameters / ranks / 2**30
            row += [f"{ranks}", f"{states:.0f}"]
            if states > card.memory_gib or count < share:
                lines.append(f"| {' | '.join([*row, 'does not fit', '', ''])} |")
                continue
            learner = learner_rates(card, shape, ranks)
            engine = actor_rates(card, shape, EngineShape(gpus=share), context=CONTEXT)
            running, engines = engine.max_running, max(1, count // 2 // share)
            each = engine.decode_request_s + CONTEXT * engine.decode_context_s
            sampled = engines * running / (engine.decode_s + running * each)
            row += [f"{1 / learner.token_s:,.0f}", f"{sampled:,.0f}", f"{learner.publish_s:.1f}"]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _bounds(name: str, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return f"`{name}` {'<=' if low is None else '>='} {high if low is None else low:g}"
    return f"`{name}` {low:g} to {high:g}"


def between(text: str, name: str, content: str) -> str:
    """The page with what stands between its two marks replaced."""
    head, opening, rest = text.partition(f"<!-- {name} -->\n")
    _, closing, tail = rest.partition(f"<!-- end of the {name.partition(':')[0]} -->")
    if not opening or not closing:
        raise ValueError(f"a page lacks the marks of {name}")
    return head + opening + "\n" + content + "\n" + closing + tail


def pages() -> dict[Path, Callable[[], str]]:
    """What each generated page holds."""

    def marked(path: Path, name: str, content: Callable[[], str]) -> Callable[[], str]:
        return lambda: between(path.read_text(), name, content())

    found: dict[Path, Callable[[], str]] = {DOCS / "configuration.md": configuration}
    found[DOCS / "combinations.md"] = combined
    found[DOCS / "metrics.md"] = marked(DOCS / "metrics.md", "metrics", metrics)
    found[DOCS / "status.md"] = status
    listed = DOCS / "experiments.md"
    found[listed] = lambda: between(
        between(listed.read_text(), "experiments", experiments()), "curves", curves_of_all()
    )
    evidence = DOCS / "evidence.md"
    found[evidence] = marked(evidence, "regimes", regime_table)
    found[DOCS / "scaling.md"] = marked(DOCS / "scaling.md", "fleets", fleet_table)
    foreign = DOCS / "coming-from.md"
    found[foreign] = marked(foreign, "keys of all", foreign_keys)
    for name in CORRECTIONS:
        path = DOCS / "corrections" / f"{name}.md"
        keys = f"keys: correction.{name}"
        found[path] = marked(path, keys, lambda name=name: correction_keys(name))
    return found | {path: (lambda text=text: text) for path, text in pictures().items()}


if __name__ == "__main__":
    assert set(shipped().model_fields) == {*CORRECTIONS, "none", *BESIDE}
    for path, content in pages().items():
        path.write_text(content())
