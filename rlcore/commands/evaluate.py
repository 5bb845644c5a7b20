"""`rlcore eval` and `rlcore export`: commands on a run's checkpoint, and the model card of an
exported model (README.md in the form of the Hugging Face hub)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from rlcore.commands import derived
from rlcore.commands.memory import stored_bytes
from rlcore.commands.model_checks import check_attention
from rlcore.commands.owner import own
from rlcore.commands.preflight import (
    Prepared,
    ask_lean_servers,
    check_writable,
    note,
    prepare,
)
from rlcore.commands.processes import Session, connected, learner_jobs
from rlcore.commands.warm_up import fresh_model, with_drafts
from rlcore.config.schema import RunConfig
from rlcore.errors import Faults, UserError
from rlcore.files import replace_file
from rlcore.learner.exporting import export_stored
from rlcore.loop import checkpoint
from rlcore.loop.evaluation import Evaluator, evaluate_alone
from rlcore.metrics.intervals import wilson
from rlcore.metrics.names import is_accuracy, size_of
from rlcore.metrics.rows import Row, run_rows
from rlcore.models.carried import complete_tokenizer
from rlcore.models.folder import read_shapes
from rlcore.progress import ProgressLine, waiting
from rlcore.spec import refuse
from rlcore.types import POLICY
from rlcore.weights.specs import RoundingSpec


def named_or_newest(
    config: RunConfig, named: str | None, note: Callable[[str], None]
) -> Path | None:
    """The checkpoint that the command names, else the newest valid one of the run, if any.

    Raises UserError if the named one cannot be used.
    """
    if named is not None:
        return checkpoint.require(named)
    root = Path(config.run_dir) / "checkpoints"
    return checkpoint.newest_valid(root, note) if root.is_dir() else None


def evaluate(config: RunConfig, named: str | None, *, model_named: bool) -> int:
    """Evaluate on the held-out prompts; prints the results and writes `eval.json`.

    `named`: the checkpoint asked for. `model_named`: the command's own words set model.path.
    """
    prepared, (model_path, folder) = check(config, named, model_named=model_named)
    config = prepared.config
    run_dir, after_s = Path(config.run_dir), config.takeover_after_s
    with own(run_dir, "rlcore eval", takeover_after_s=after_s) as owner:
        if owner.news:
            note(owner.news)
        for line in [f"evaluating {folder or model_path}", *prepared.remarks]:
            note(line)
        results = _results(config, prepared, model_path, folder)
        owner.require()
        replace_file(owner.folder / "eval.json", json.dumps(results, indent=1))
    for name, value in results.items():
        interval = _with_interval(name, results).partition(" ")[2]
        note(f"{name:40s} {value:.4f} {interval}".rstrip())
    return 0


def check(
    config: RunConfig, named: str | None, *, model_named: bool
) -> tuple[Prepared, tuple[str, Path | None]]:
    """The needs of an evaluation, and the result of `to_evaluate`. Raises UserError with all
    faults."""
    faults = Faults()
    found = faults.of(to_evaluate, config, named, model_named)
    # A checkpoint's run has the actors that its model was trained for.
    if found is not None and found[1] is None:
        faults.of(check_attention, config)
    prepared = faults.of(prepare, config, trains=False)
    faults.of(check_writable, "run_dir", config.run_dir)
    faults.of(ask_lean_servers, config)
    faults.end()
    assert prepared is not None and found is not None
    return prepared, found


def _results(
    config: RunConfig, prepared: Prepared, model_path: str, folder: Path | None
) -> dict[str, float]:
    """Metrics of the evaluation; its processes have ended when this returns."""
    # A checkpoint holds the learner's sharded state, which only its ranks can publish from.
    learner = folder is not None
    size = stored_bytes(config, prepared.tokenizer) if learner else 0
    with ExitStack() as stack:
        with waiting("eval", "starting Ray"):
            stack.enter_context(connected(config, learner=learner, store_bytes=size))
        config = with_drafts(config, prepared, note)
        with waiting("eval", "starting its processes"):
            session = Session(
                config, model_path, pad_id=prepared.pad_id, note=note, with_learner=learner
            )
        stack.callback(session.close)
        return asyncio.run(_evaluate(config, session, prepared, folder))


async def _evaluate(
    config: RunConfig, session: Session, prepared: Prepared, folder: Path | None
) -> dict[str, float]:
    fleet, scorer = session.fleet, session.scorer
    assert fleet is not None and scorer is not None
    version = 0
    if folder is not None:
        assert session.learner is not None
        version = int(checkpoint.state_of(folder)["progress"]["step"])
        session.learner.load(str(folder / "learner"))
        # Actors start with the run's first model; every tensor's checksum is compared.
        publication = await session.learner.publish(version, full=True, resumed=None)
        if fleet.colocated:
            await session.learner.release()
        await fleet.publish(publication, session.learner.send)
    evaluator = Evaluator(config.evaluation, prepared.heldout, fleet, scorer, _no_samples)
    progress = ProgressLine("eval", "answers")
    evaluator.progress = progress.show
    try:
        return await evaluate_alone(evaluator, fleet, version, config.cluster.heartbeat_s)
    finally:
        progress.close()


def to_evaluate(config: RunConfig, named: str | None, model_named: bool) -> tuple[str, Path | None]:
    """(starting model's folder, checkpoint of it or None).

    A model that the command names takes precedence over the run's checkpoints, and so does one of a
    configuration without a run. Raises UserError where the choice is ambiguous.
    """
    own, run = config.model.path, Path(config.run_dir) / "config.yaml"
    if named is None and own is not None and (model_named or not run.is_file()):
        return own, None
    folder = named_or_newest(config, named, note)
    if folder is None:
        raise UserError(
            f"run_dir={config.run_dir} holds no valid checkpoint to evaluate: name a run that has "
            "one, checkpoint=PATH, or a model folder with model.path=FOLDER."
        )
    started = str(checkpoint.state_of(folder)["model_path"])
    another = own is not None and Path(own).resolve() != Path(started).resolve()
    if run.is_file() and model_named and another:
        raise UserError(
            f"checkpoint={named} continues the model {started}, not model.path={own}: leave one of "
            "them out."
        )
    return started, folder


def _no_samples(version: int, label: str, verdicts: Sequence[Mapping[str, Any]]) -> None:
    """An evaluation alone keeps no readable samples."""


def export(
    config: RunConfig,
    named: str | None,
    out: str,
    *,
    optimizer: bool = False,
    form: str = "trained",
    dtype: str | None = None,
) -> int:
    """Write a checkpoint's policy to `out`, in this process: no role is started, and no GPU is
    needed. What training leaves as it is is copied from the folder that the run started from.

    Beneath it: `adapter` (LoRA), `sparse` (DistillSparse's merged sparse model and its adapter),
    `draft` (co-trained), and with `optimizer` the learner's state as whole float32 tensors in
    `learner`. `named`: the checkpoint; None: the run's newest. `form`: of the policy's weights
    (`config/verbs.py`); `dtype`: their format, None: the starting folder's. Raises UserError.
    """
    folder = named_or_newest(config, named, note)
    if folder is None:
        raise UserError(f"run_dir={config.run_dir} holds no valid checkpoint to export.")
    refuse(os.path.lexists(out), f"out={out} exists: choose another folder.")
    prepared = prepare(config, trains=False, evaluates=False)
    progress = checkpoint.state_of(folder)
    model_path = str(progress["model_path"])
    rounding = _rounding(config, form, model_path)
    refuse(
        rounding is not None and dtype is not None,
        f"dtype={dtype} is of weights as trained, and format={form} has its own formats: leave "
        "one of them out.",
    )
    # rounding begins with the values that actors are sent
    dtype = dtype if rounding is None else config.learner.compute_dtype
    with tempfile.TemporaryDirectory() as made:
        config = _with_drafts(config, prepared, Path(made))
        for name, job in learner_jobs(config, model_path, prepared.pad_id).items():
            state, sub = ("learner", "") if name == POLICY else (name, name)
            with waiting("export", f"writing {name} to {Path(out) / sub}"):
                export_stored(job, folder / state, Path(out) / sub, dtype)
    with waiting("export", "rounding its weights"):
        weights = "as trained" if rounding is None else _rounded(Path(out), rounding, form)
    if (draft := Path(out) / "draft").is_dir():
        complete_tokenizer(draft, model_path)  # a folder is only usable with one
    if optimizer:
        from rlcore.learner.state_files import join_state

        join_state(folder / "learner", Path(out) / "learner")
    card = model_card(config, model_path, int(progress["progress"]["step"]), weights)
    (Path(out) / "README.md").write_text(card, encoding="utf-8")
    note(f"{folder.name} written to {out}; to serve it: vllm serve {shlex.quote(out)}")
    return 0


def _rounding(config: RunConfig, form: str, model_path: str) -> RoundingSpec | None:
    """How the exported weights are rounded. Raises UserError for a form that they cannot have."""
    if form == "trained":
        return None
    found = derived.served_rounding(config, f"format={form}")
    if form == "compressed-tensors":
        from rlcore.weights.compressed import check_layout

        check_layout(read_shapes(model_path), found)
    return found


def _rounded(out: Path, rounding: RoundingSpec, form: str) -> str:
    """Round the weights of an exported folder; a word on them for its card."""
    from rlcore.weights.compressed import round_folder

    count = round_folder(out, rounding, form)
    return f"{count} matrices rounded to {rounding.rounding}, format={form}"


def _with_drafts(config: RunConfig, prepared: Prepared, folder: Path) -> RunConfig:
    """The configuration with a model folder for every draft that the run made: one of random
    weights, since a checkpoint holds all that a trained draft has."""
    actors = dict(config.actor)
    for label, actor in config.actor.items():
        if config.learner.draft is not None and actor.draft_fresh is not None:
            model = config.model.model_copy(update={"fresh": actor.draft_fresh})
            own = config.model_copy(update={"model": model})
            path = str(fresh_model(own, prepared, folder / label))
            actors[label] = actor.model_copy(update={"draft_path": path, "draft_fresh": None})
    return config.model_copy(update={"actor": actors})


# of an absolute path, up to its last part; not of an address
FOLDERS = re.compile(r"(?<![\w.:/-])/(?:[^\s/`|\"':,;()<>]+/)+")


def model_card(config: RunConfig, base: str, step: int, weights: str = "as trained") -> str:
    """The card of the model after `step` steps. `base`: the model that the run started from.
    `weights`: a word on their form.

    It contains only facts that the run's folder records, and no path of this machine.
    """
    run_dir = Path(config.run_dir)
    rows = [row for row in run_rows(run_dir) if (row["step"] or 0) <= step]
    head: dict[str, Any] = {"library_name": "transformers", "tags": ["rlcore", "rl"]}
    if config.model.path is not None:
        head["base_model"] = Path(base).name
    lines = ["---", yaml.safe_dump(head, sort_keys=False).strip(), "---", f"# {run_dir.name}", ""]
    lines += [f"Trained by reinforcement learning with rlcore, {step} optimizer steps.", ""]
    lines += ["| | |", "| --- | --- |", *(f"| {n} | {v} |" for n, v in _facts(config, base))]
    lines += [f"| weights | {weights} |", ""]
    lines += _evaluation(rows)
    about = run_dir / "about.json"
    if about.is_file():
        lines += ["## Versions", "", "```json", json.dumps(json.loads(about.read_text()), indent=1)]
        lines += ["```", ""]
    return FOLDERS.sub("", "\n".join(lines))


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
    """The first and the newest held-out results, each with its evaluation's interval."""
    first: dict[str, str] = {}
    newest: dict[str, str] = {}
    for row in rows:
        found = {n: v for n, v in row.items() if n.startswith("eval/") and v is not None}
        beside = ("/stderr_", "/effective_")
        shown = {n: _with_interval(n, found) for n in found if not any(b in n for b in beside)}
        newest |= shown
        first = shown | first
    if not newest:
        return []
    lines = ["## Held-out results", "", "| metric | first | newest |", "| --- | --- | --- |"]
    lines += [f"| `{n}` | {first[n]} | {newest[n]} |" for n in sorted(newest)]
    if any(" to " in text for text in newest.values()):
        lines += ["", INTERVALS]
    return [*lines, ""]


INTERVALS = (
    "In parentheses the 95 % interval (Wilson's, by the effective number of answers, clustered by "
    "prompt) of this run's answers."
)


def _with_interval(name: str, found: dict[str, float]) -> str:
    size = found.get(size_of(name)) if is_accuracy(name) else None
    if not size:
        return f"{found[name]:.4g}"
    ends = wilson(found[name], size)
    return f"{found[name]:.4g} ({ends.low:.3g} to {ends.high:.3g})"
