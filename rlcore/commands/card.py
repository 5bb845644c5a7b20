"""The model card of an exported model: README.md in the form of the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rlcore.config.schema import RunConfig
from rlcore.metrics.rows import Row, read_rows


def model_card(config: RunConfig, base: str, step: int) -> str:
    """The card of the model after `step` steps. `base`: the model that the run started from.

    It says what the run's folder says and nothing else: what is not recorded is left out.
    """
    run_dir = Path(config.run_dir)
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if (row["step"] or 0) <= step]
    head: dict[str, Any] = {"library_name": "transformers", "tags": ["rlcore", "rl"]}
    if config.model.path is not None:
        head["base_model"] = Path(base).name
    lines = ["---", yaml.safe_dump(head, sort_keys=False).strip(), "---", f"# {run_dir.name}", ""]
    lines += [f"Trained by reinforcement learning with rlcore, {step} optimizer steps.", ""]
    lines += ["| | |", "| --- | --- |", *(f"| {n} | {v} |" for n, v in _facts(config, base)), ""]
    lines += _evaluation(rows)
    about = run_dir / "about.json"
    if about.is_file():
        lines += ["## Versions", "", "```json", json.dumps(json.loads(about.read_text()), indent=1)]
        lines += ["```", ""]
    return "\n".join(lines)


def _facts(config: RunConfig, base: str) -> Iterator[tuple[str, object]]:
    yield "base model", base if config.model.path is not None else "a fresh one, of model.fresh"
    for label, task in config.tasks.items():
        data = task.args.get("train_path")
        yield f"task {label}", f"`{task.name}`" + (f", data `{data}`" if data else "")
        own = [] if task.grade_weight is None else [f"{task.grade_weight:g} x its grader"]
        further = [f"{reward.weight:g} x {name}" for name, reward in task.rewards.items()]
        yield f"reward of {label}", " + ".join([*own, *further])
    algorithm = config.algorithm
    yield "advantage, loss", f"`{algorithm.advantage}`, `{algorithm.loss}`"
    corrections = [entry.name for entry in config.correction.entries]
    yield "corrections", ", ".join(f"`{name}`" for name in corrections) or "none"
    kinds = [f"{actor.count} x {actor.kind}" for actor in config.actor.values()]
    yield "actors", ", ".join(kinds)
    schedule = config.schedule
    period = schedule.steps_per_publish
    yield "staleness admitted", f"{schedule.max_staleness} steps; published every {period}"
    yield "seed", config.seed


def _evaluation(rows: list[Row]) -> list[str]:
    """The first and the newest held-out results."""
    first: dict[str, float] = {}
    newest: dict[str, float] = {}
    for row in rows:
        found = {n: v for n, v in row.items() if n.startswith("eval/") and v is not None}
        newest |= found
        first = found | first
    if not newest:
        return []
    lines = ["## Held-out results", "", "| metric | first | newest |", "| --- | --- | --- |"]
    lines += [f"| `{n}` | {first[n]:.4g} | {newest[n]:.4g} |" for n in sorted(newest)]
    return [*lines, ""]
