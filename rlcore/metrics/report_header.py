"""The head of a report: what was run, where, and whether it is healthy, in words."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from rlcore.metrics.cells import duration, number
from rlcore.metrics.digest import Digest
from rlcore.metrics.run_folder import Run

NOT_JUDGED = "not judged"  # how a judge begins what it says of a run that it cannot judge


def header(run: Run) -> str:
    """A card: the verdict, the warnings, and the facts of one run."""
    kind, said = verdict(run)
    listed = [w for w in run.warnings or () if kind != "unsure"]
    warned = "".join(f"<li>{escape(text)}</li>" for text in listed)
    facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in described(run).items())
    return (
        f'<article class="run"><h2>{escape(run.name)}</h2>'
        f'<p class="verdict {kind}">{escape(said)}</p>'
        f"{f'<ul>{warned}</ul>' if warned else ''}<dl>{facts}</dl></article>"
    )


def verdict(run: Run) -> tuple[str, str]:
    """("well" | "ill" | "unsure", a sentence)."""
    warnings, steps = run.warnings, len(run.rows)
    failed = run.status.get("phase") == "failed"
    if failed:
        return "ill", f"The run failed after step {run.status.get('step', steps)}."
    if not steps:
        return "unsure", "No learner step is finished yet."
    if warnings is None:
        return "unsure", f"{steps} steps; nobody judged them."
    if warnings and warnings[0].startswith(NOT_JUDGED):
        return "unsure", f"{steps} steps, {warnings[0]}"
    if not warnings:
        return "well", f"Healthy: no bound of logging.warnings was passed in {steps} steps."
    count = len(warnings)
    return "ill", f"{count} warning{'s' if count > 1 else ''} in {steps} steps:"


def described(run: Run) -> dict[str, str]:
    """What was run, with what, and what came of it, by a short name. Unknown ones are left out."""
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
    return f"{ranks} rank{plural}, ZeRO {learner.get('zero_stage')}, lr {learner.get('lr')}{lora}"


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
        f"{figure.name} {figure.first} to {figure.shown}"
        for figure in digest.figures()
        if figure.first and (figure.name.startswith("eval ") or figure.name == "reward/mean")
    ]
    time = f" in {duration(took)}" if took is not None else ""
    return ", ".join([f"{number(run.rows[-1]['step'])} steps{time}", *last])
