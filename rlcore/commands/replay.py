"""`rlcore replay`: execute a step of a run again, from its recorded batches, with its own or other
settings."""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlcore.buffer.specs import SelectionSpec
from rlcore.cluster.recordings import folder_of, read_recording, steps_in
from rlcore.cluster.sample_text import UNFINISHED
from rlcore.commands import derived
from rlcore.commands.preflight import note, prepare
from rlcore.commands.processes import Session, connected
from rlcore.commands.warm_up import starting_model, with_drafts
from rlcore.config.compose import flat
from rlcore.config.schema import RunConfig
from rlcore.config.sentences import written
from rlcore.errors import UserError
from rlcore.loop import checkpoint
from rlcore.loop.run_plan import Plan
from rlcore.metrics.console import wide_console
from rlcore.metrics.health import RECORDER
from rlcore.metrics.rows import Row, run_rows
from rlcore.progress import waiting
from rlcore.rooms import from_room
from rlcore.serialization import load_trajectory

SHOWN = 20  # tokens
AROUND = 12  # tokens of context on either side of one that is shown
WRITE_S = 600.0  # for the learner's state between two configurations
UNREPEATABLE = ("time/", "memory/", "throughput/")
Tokens = Mapping[tuple[int, int], Mapping[str, Sequence[float]]]


@dataclass(frozen=True, slots=True)
class Executed:
    """A step of one configuration: its metrics, the part of every token in its loss, and the
    parameters' gradient against the first configuration's."""

    metrics: dict[str, float]
    tokens: Tokens
    gradient: dict[str, float]


@dataclass(frozen=True, slots=True)
class Beginning:
    """The state that the steps before the wanted one are trained from again."""

    step: int
    folder: Path | None  # of a learner's state, "learner"; None: the run's first model
    model_path: str | None


def replay(
    config: RunConfig,
    changed: RunConfig | None,
    step: int,
    *,
    tokens: int,
    as_json: bool,
    out: str | None = None,
) -> int:
    """Execute step `step` (of metrics.jsonl) again, and with the settings of `changed`, if any.

    `tokens`: how many with the largest slope are shown. `out`: the page; None: in the run's folder.
    Raises UserError for a step that is not recorded, RecordingError for a damaged recording.
    """
    if changed is not None:
        _require_comparable(config, changed)
    config = _unrecorded(config)
    row = _row(config, step)
    plan = derived.plan(config)
    begin = _beginning(config, plan, step - 1)
    # in the run's folder, which the ranks of all nodes have
    with tempfile.TemporaryDirectory(dir=config.run_dir, prefix=".replay-") as between:
        executed = _execute(config, plan, begin, step - 1, Path(between) if changed else None)
        other = None
        if changed is not None:
            at = Beginning(step - 1, Path(between), begin.model_path)
            other = _execute(_unrecorded(changed), plan, at, step - 1, at.folder)
    found = _compared(row, executed, other)
    if changed is not None:
        found["settings"] = _differing_settings(config, changed)
    found["tokens"] = _shown(config, step - 1, executed.tokens, tokens)
    run_dir = Path(config.run_dir)
    page = Path(out) if out else run_dir / f"replay_{step}.html"
    from_room("write_replay")(page, run_dir.name, step, found)
    note(f"the page is {page}")
    if as_json:
        print(json.dumps({"step": step, **found}, indent=2))
    else:
        _print(step, found)
    return 0


def _require_comparable(config: RunConfig, changed: RunConfig) -> None:
    """Raise UserError unless only the update differs: batch and weights are as recorded."""
    one, other = config.model_dump(mode="json"), changed.model_dump(mode="json")
    sections = [name for name in other if one[name] != other[name]]
    for name in sections:
        if name not in ("correction", "algorithm"):
            raise UserError(
                f"{name} differs from the run's: rlcore replay executes a recorded step with other "
                "correction and algorithm settings alone."
            )
    for name in SelectionSpec.model_fields:
        if one["algorithm"][name] != other["algorithm"][name]:
            raise UserError(
                f"algorithm.{name}={other['algorithm'][name]} is not accepted by rlcore replay: it "
                "decides which samples a batch has, and the batch is recorded."
            )


def _differing_settings(config: RunConfig, changed: RunConfig) -> list[str]:
    """The settings of the second execution that differ from the run's."""
    one, other = (flat(c.model_dump(mode="json")) for c in (config, changed))
    return [
        f"{key}={written(other.get(key))}"
        for key in sorted(one | other)
        if one.get(key) != other.get(key) and key.startswith(("correction.", "algorithm."))
    ]


def _unrecorded(config: RunConfig) -> RunConfig:
    """The configuration of a command that records nothing and starts no actors."""
    recorder = config.logging.recorder.model_copy(update={"steps": 0})
    return config.model_copy(
        update={"logging": config.logging.model_copy(update={"recorder": recorder})}
    )


def _row(config: RunConfig, step: int) -> Row:
    rows = run_rows(config.run_dir)
    for row in rows:
        if row.get("step") == step:
            return row
    last = rows[-1].get("step") if rows else "none"
    raise UserError(
        f"step={step} is not accepted: {config.run_dir}/metrics.jsonl has no such step; its last "
        f"is {last}."
    )


def _beginning(config: RunConfig, plan: Plan, step: int) -> Beginning:
    """The newest state from which all batches up to `step`'s are recorded."""
    run_dir = Path(config.run_dir)
    recorded = set(steps_in(run_dir / RECORDER))
    for at in sorted({0, *steps_in(run_dir / "checkpoints")}, reverse=True):
        if at > step or not _needed(plan, at, step) <= recorded:
            continue
        if at == 0:
            return Beginning(0, None, None)
        folder = run_dir / "checkpoints" / checkpoint.name_of(at)
        if checkpoint.problem_with(folder) is None:
            return Beginning(at, folder, str(checkpoint.state_of(folder)["model_path"]))
    span = f"{min(recorded) + 1} to {max(recorded) + 1}" if recorded else "none"
    raise UserError(
        f"step={step + 1} is not accepted: its batch, or one between a checkpoint and it, is not "
        f"recorded (logging.recorder.steps, max_gib); {run_dir / RECORDER} holds batches of steps: "
        f"{span}."
    )


def _batches(plan: Plan, phase: Sequence[int]) -> dict[int, int]:
    """The remaining first steps of a phase -> the steps that their batches were recorded at, since
    later epochs train on the batches of the first."""
    start, distinct = phase[0] - _offset(plan, phase[0]), plan.phases.batches
    return {step: start + (step - start) % distinct for step in phase[:distinct]}


def _offset(plan: Plan, step: int) -> int:
    """Steps of the phase before `step`."""
    return step % plan.phases.steps


def _needed(plan: Plan, begin: int, step: int) -> set[int]:
    """The recorded steps that training from `begin` to `step` needs."""
    found: set[int] = set()
    while begin <= step:
        phase = range(begin, plan.phase_end(begin))
        found |= set(_batches(plan, phase).values())
        begin = phase[-1] + 1
    return found


def _execute(
    config: RunConfig, plan: Plan, begin: Beginning, step: int, between: Path | None
) -> Executed:
    """Train from `begin` to `step`. `between`: a folder for the state before that step and its
    gradient, or `begin` itself, whose gradient this one's is compared with."""
    prepared = prepare(config, evaluates=False)
    with ExitStack() as stack:
        with waiting("replay", "starting Ray"):
            stack.enter_context(connected(config, actors=False))
        model_path = begin.model_path or starting_model(config, prepared, note)
        config = with_drafts(config, prepared, note)
        with waiting("replay", "starting the learner"):
            session = Session(
                config, model_path, pad_id=prepared.pad_id, note=note, with_actors=False
            )
        stack.callback(session.close)
        with waiting("replay", f"reading what step {begin.step + 1} begins with") as progress:
            return asyncio.run(_steps(config, session, plan, begin, step, between, progress))


async def _steps(
    config: RunConfig,
    session: Session,
    plan: Plan,
    begin: Beginning,
    step: int,
    between: Path | None,
    progress: Callable[[str], None],
) -> Executed:
    learner, at, resumed = session.learner, begin.step, None
    assert learner is not None
    if begin.folder is not None:
        resumed = str(begin.folder / "learner")
        if not _offset(plan, at):  # else p_ref is computed first, under older weights
            learner.load(resumed)
            resumed = None
    while True:
        phase = list(range(at, plan.phase_end(at)))
        batches = _batches(plan, phase)
        await learner.fetch_recorded(batches, config.run_dir)
        await learner.begin_phase(
            phase, batches=len(batches), keep_start=len(phase) > 1, resumed=resumed
        )
        resumed = None
        for number in phase:
            progress(f"step {number + 1}, up to step {step + 1}")
            if number == step:
                if between is not None and begin.folder != between:
                    in_phase = number != phase[0] or bool(_offset(plan, number))
                    await learner.save(str(between / "learner"), in_phase=in_phase)
                    await learner.saved(timeout_s=WRITE_S)
                folder = None if between is None else str(between / "gradient")
                return Executed(*await learner.traced_step(step, folder))
            await learner.train_step(number)
        at = phase[-1] + 1


# ----- comparison -----


def _compared(row: Row, executed: Executed, other: Executed | None) -> dict[str, Any]:
    """Figures of the run's row, of the step again, and of the other configuration."""
    figures: dict[str, dict[str, float | None]] = {}
    for name in sorted(executed.metrics):
        if name.startswith(UNREPEATABLE):
            continue
        figures[name] = {"run": _number(row.get(name)), "again": executed.metrics[name]}
    if other is not None:
        for name in sorted(other.metrics):
            if not name.startswith(UNREPEATABLE):
                figures.setdefault(name, {"run": None, "again": None})
                figures[name]["changed"] = other.metrics[name]
    differing = [
        name for name, f in figures.items() if f["run"] is not None and f["run"] != f["again"]
    ]
    found: dict[str, Any] = {"figures": figures, "differing": differing}
    if other is not None:
        found["cosine"] = _cosine(executed.tokens, other.tokens)
        found["gradient"] = other.gradient
    return found


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _cosine(one: Tokens, other: Tokens) -> float | None:
    """The cosine of two gradients by the log-probs of the tokens; None where one of them is 0."""
    dot = squares = others = 0.0
    for key, values in one.items():
        for a, b in zip(values["slope"], other[key]["slope"], strict=True):
            dot, squares, others = dot + a * b, squares + a * a, others + b * b
    size = math.sqrt(squares * others)
    return dot / size if size else None


def _shown(config: RunConfig, step: int, tokens: Tokens, count: int) -> list[dict[str, Any]]:
    """The tokens with the largest slopes, in their text."""
    whole = sum(abs(s) for values in tokens.values() for s in values["slope"]) or 1.0
    places = [(abs(s), key, i) for key, v in tokens.items() for i, s in enumerate(v["slope"])]
    chosen = sorted(places, reverse=True)[:count]
    if not chosen:
        return []
    tokenizer = prepare(config, evaluates=False).tokenizer
    ids = _sampled_ids(config, derived.plan(config), step)
    found = []
    for size, key, i in chosen:
        of, values = ids[key], tokens[key]
        found.append(
            {
                "group_id": key[0],
                "sample": key[1],
                "token": i,
                "share": size / whole,
                "text": _text(tokenizer, of, i),
                "before": tokenizer.decode(of[max(0, i - AROUND) : i]),
                "after": tokenizer.decode(of[i + 1 : i + 1 + AROUND]),
                **{name: values[name][i] for name in ("slope", "weight", "kept", "advantage")},
            }
        )
    return found


def _text(tokenizer: Any, ids: Sequence[int], at: int) -> str:
    """The text that one token adds; the token's own name where it adds none, as the end of a
    sequence or a part of a character."""
    first = max(0, at - AROUND)
    text: str = tokenizer.decode(ids[first : at + 1])[len(tokenizer.decode(ids[first:at])) :]
    if text and UNFINISHED not in text:
        return text
    # a fresh model may have more rows than its tokenizer has tokens
    return tokenizer.convert_ids_to_tokens(ids[at]) or f"<{ids[at]}>"


def _sampled_ids(config: RunConfig, plan: Plan, step: int) -> dict[tuple[int, int], list[int]]:
    """The sampled tokens of every recorded sample of a step's batch, all parts together."""
    (recorded,) = _batches(plan, [step]).values()
    found: dict[tuple[int, int], list[int]] = {}
    for path in sorted(folder_of(config.run_dir, recorded).glob("policy-*.bin")):
        for group in read_recording(path):
            for episode in group.episodes:
                parts = [load_trajectory(record) for record in episode.records]
                key = group.group_id, episode.score.sample_index
                found[key] = [int(t) for p in parts for t in p.token_ids[p.sampled]]
    return found


# Figures of a step in the order of their weight for a reader; the others follow by name.
FIRST = ("loss", "grad_norm", "reward/mean", "mismatch/ess", "mismatch/kl_k3", "staleness/mean")


def _print(step: int, found: Mapping[str, Any]) -> None:
    """Print the finding, then the tokens that it came from, then every figure."""
    console = wide_console()
    changed, figures = "cosine" in found, found["figures"]
    compared = sum(f["run"] is not None for f in figures.values())
    said = f"step {step}: all {compared} figures are equal to the bit"
    if found["differing"]:
        names = ", ".join(found["differing"])
        said = f"step {step}: {len(found['differing'])} of {compared} figures differ: {names}"
    console.print(said, soft_wrap=True)
    if changed:
        _print_change(console, found)
    if found["tokens"]:
        _print_tokens(console, found["tokens"])
    table = Table("figure", "run", "again", *(["changed"] if changed else []))
    weight = [*FIRST, *found["differing"]]
    for name in sorted(figures, key=lambda n: (weight.index(n) if n in weight else len(weight), n)):
        cells = [figures[name].get(column) for column in ("run", "again", "changed")[: 2 + changed]]
        table.add_row(name, *("-" if cell is None else f"{cell:.6g}" for cell in cells))
    console.print(table)


def _print_change(console: Console, found: Mapping[str, Any]) -> None:
    cosine, of = found["cosine"], found["gradient"]
    words = "-" if cosine is None else f"{cosine:.4f}"
    console.print(f"cosine of the gradients by log-probs, executed and changed: {words}")
    words = f"{of['cosine']:.4f}" if "cosine" in of else "-"
    norms = f"{of['executed_norm']:.6g} and {of['norm']:.6g}"
    console.print(f"cosine of the parameters' gradients: {words}; their norms: {norms}")


def _print_tokens(console: Console, tokens: Sequence[Mapping[str, Any]]) -> None:
    table = Table("share", "slope", "weight", "advantage", "sample", "text", title="largest slopes")
    for t in tokens:
        before, token, after = (
            escape(repr(text)) for text in (t["before"][-40:], t["text"], t["after"][:40])
        )
        text = f"{before} [bold]{token}[/bold] {after}"
        table.add_row(
            f"{t['share']:.1%}",
            *(f"{t[name]:.3g}" for name in ("slope", "weight", "advantage")),
            f"{t['group_id']}/{t['sample']}",
            text,
        )
    console.print(table)
