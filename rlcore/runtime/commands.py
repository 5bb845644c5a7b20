"""`rlcore sft`, `rlcore eval` and `rlcore export`: the session's parts without the training loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlcore.config.compose import to_yaml
from rlcore.config.schema import RunConfig, WarmupConfig
from rlcore.errors import UserError
from rlcore.models import build_fresh_model
from rlcore.runtime import checkpoint as checkpoints
from rlcore.runtime import options
from rlcore.runtime.cluster import cluster
from rlcore.runtime.fleet import Publication
from rlcore.runtime.learners import Learners
from rlcore.runtime.preflight import check_attention, open_run_dir, prepare
from rlcore.runtime.session import Session
from rlcore.runtime.warmup import supervise, with_drafts
from rlcore.seeding import derive_seed


def _note(text: str) -> None:
    print(text, flush=True)


@contextmanager
def _ray(config: RunConfig, *, actors: bool, learner: bool) -> Iterator[None]:
    cpus, gpus = options.needed(config, actors=actors, learner=learner)
    with cluster(
        address=config.cluster.address,
        num_cpus=config.cluster.num_cpus,
        needed_cpus=cpus,
        needed_gpus=gpus,
        object_store_mib=config.cluster.object_store_mib,
    ):
        yield


def sft(config: RunConfig) -> int:
    """Supervised warm-up of `model.path` or of a fresh model; writes `run_dir/model`, a Hugging Face folder."""
    prepared = prepare(config, evaluates=False)
    run_dir = open_run_dir(config)
    out = run_dir / "model"
    if out.exists():
        raise UserError(f"run_dir={run_dir} already holds a model: choose another folder.")
    (run_dir / "config.yaml").write_text(to_yaml(config))
    start = config.model.path
    if start is None:
        assert config.model.fresh is not None
        start = str(
            build_fresh_model(
                run_dir / "fresh",
                prepared.prompts.task.alphabet() or "",
                seed=derive_seed(config.seed, "fresh-model"),
                max_len=config.model.max_len,
                **config.model.fresh.model_dump(),
            )
        )
    with _ray(config, actors=False, learner=True):
        supervise(config, config.model.warmup or WarmupConfig(), prepared, start, out, _note)
    _note(f"model written to {out}")
    return 0


def evaluate(config: RunConfig, named: str | None, *, model_named: bool) -> int:
    """Evaluate a checkpoint of a run, or a model folder; prints and writes `eval.json`.

    `named`: the checkpoint asked for. `model_named`: model.path was asked for by the command's own words.
    """
    model_path, folder = to_evaluate(config, named, model_named)
    if folder is None:
        check_attention(config)
    prepared = prepare(config, trains=False)
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    _note(f"evaluating {folder or model_path}")
    with _ray(config, actors=True, learner=folder is not None):
        config = with_drafts(config, prepared, _note)
        session = Session(
            config,
            model_path,
            pad_id=prepared.pad_id,
            run_dir=run_dir,
            note=_note,
            with_learner=folder is not None,
        )
        try:
            results = asyncio.run(_evaluate(config, session, prepared, folder))
        finally:
            session.close()
    (run_dir / "eval.json").write_text(json.dumps(results, indent=1))
    for name, value in results.items():
        _note(f"{name:40s} {value:.4f}")
    return 0


async def _evaluate(config: RunConfig, session: Session, prepared: Any, folder: Path | None) -> dict[str, float]:
    version = 0
    if folder is not None:
        version = int(checkpoints.state_of(folder)["progress"]["step"])
        session.each_learner("load", str(folder / "learner"), what="the learner to load its checkpoint")
        await session.fleet.publish(await _publication(config, session, folder, version))
    evaluator = session.evaluator(prepared, lambda version, label, verdicts: None)
    await evaluator.start(version)
    collecting = asyncio.create_task(evaluator.collect(wait=True))
    while not (await asyncio.wait([collecting], timeout=config.cluster.heartbeat_s))[0]:
        await session.fleet.watch()
        await session.fleet.assign(session.fleet.take_lost())
    return collecting.result()


async def _publication(config: RunConfig, session: Session, folder: Path, version: int) -> Publication:
    """The weights of a checkpoint, for every kind of actor."""
    if session.draft_learners:
        session.each_learner("load", str(folder / "draft"), what="the draft's learner to load its state", draft=True)
    learners = Learners(session.learners, session.draft_learners, timeout_s=config.schedule.step_timeout_s)
    return await learners.publish(
        version,
        options.wire_dtype(config),
        True,
        config.seed,
        resumed=None,
        sparse_copy=config.learner.distill is not None,
    )


def to_evaluate(config: RunConfig, named: str | None, model_named: bool) -> tuple[str, Path | None]:
    """(starting model's folder, checkpoint of it or None). Raises UserError rather than take another than was meant.

    A model that the command names goes before the run's checkpoints; so does one of a configuration without a run.
    """
    own, run = config.model.path, Path(config.run_dir) / "config.yaml"
    if named is None and own is not None and (model_named or not run.is_file()):
        return own, None
    folder = _checkpoint(config, named)
    if folder is None:
        raise UserError(
            f"run_dir={config.run_dir} holds no valid checkpoint to evaluate: name a run that has one, "
            "checkpoint=PATH, or a model folder with model.path=FOLDER."
        )
    started = str(checkpoints.state_of(folder)["model_path"])
    if run.is_file() and model_named and own is not None and Path(own).resolve() != Path(started).resolve():
        raise UserError(
            f"checkpoint={named} continues the model {started}, not model.path={own}: leave one of them out."
        )
    return started, folder


def export(config: RunConfig, named: str | None, out: str) -> int:
    """Write a checkpoint's policy and its tokenizer as a plain Hugging Face folder.

    Beside it: `adapter` (LoRA), `sparse` (DistillSparse's merged sparse model and its adapter), `draft` (co-trained).
    """
    folder = _checkpoint(config, named)
    if folder is None:
        raise UserError(f"run_dir={config.run_dir} holds no valid checkpoint to export.")
    if Path(out).exists():
        raise UserError(f"out={out} exists: choose another folder.")
    prepared = prepare(config, trains=False, evaluates=False)
    with _ray(config, actors=False, learner=True):
        model_path = checkpoints.state_of(folder)["model_path"]
        config = with_drafts(config, prepared, _note) if config.learner.draft else config
        session = Session(
            config,
            model_path,
            pad_id=prepared.pad_id,
            run_dir=Path(config.run_dir),
            note=_note,
            with_actors=False,
        )
        try:
            session.each_learner("load", str(folder / "learner"), what="the learner to load its checkpoint")
            session.each_learner("export", out, what="the model to be written")
            if session.draft_learners:
                session.each_learner("load", str(folder / "draft"), what="the draft to load its state", draft=True)
                session.each_learner("export", str(Path(out) / "draft"), what="the draft to be written", draft=True)
        finally:
            session.close()
    for sub in ("", "sparse", "draft"):
        if (Path(out) / sub).is_dir():
            prepared.tokenizer.save_pretrained(Path(out) / sub)
    _note(f"{folder.name} written to {out}")
    return 0


def _checkpoint(config: RunConfig, named: str | None) -> Path | None:
    if named is not None:
        return checkpoints.require(named)
    root = Path(config.run_dir) / "checkpoints"
    return checkpoints.newest_valid(root, _note) if root.is_dir() else None
