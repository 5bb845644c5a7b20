"""`rlcore eval`: evaluate a run's checkpoint, or a model folder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.commands.checkpoints import named_or_newest
from rlcore.commands.model_checks import check_attention
from rlcore.commands.notes import note
from rlcore.commands.owner import own
from rlcore.commands.preflight import Prepared, prepare
from rlcore.commands.reward_checks import ask_lean_servers
from rlcore.commands.session import Session, connected
from rlcore.commands.sizes import stored_bytes
from rlcore.commands.warm_up import with_drafts
from rlcore.config.schema import RunConfig
from rlcore.errors import UserError
from rlcore.loop import checkpoint
from rlcore.loop.evaluation import Evaluator, evaluate_alone


def evaluate(config: RunConfig, named: str | None, *, model_named: bool) -> int:
    """Evaluate on the held-out prompts; prints the results and writes `eval.json`.

    `named`: the checkpoint asked for. `model_named`: the command's own words set model.path.
    """
    model_path, folder = to_evaluate(config, named, model_named)
    # A checkpoint's run has the actors that its model was trained for.
    if folder is None:
        check_attention(config)
    prepared = prepare(config, trains=False)
    config = prepared.config
    ask_lean_servers(config)
    run_dir, after_s = Path(config.run_dir), config.takeover_after_s
    with own(run_dir, "rlcore eval", takeover_after_s=after_s) as owner:
        if owner.news:
            note(owner.news)
        note(f"evaluating {folder or model_path}")
        results = _results(config, prepared, model_path, folder)
        owner.require()
        (owner.folder / "eval.json").write_text(json.dumps(results, indent=1))
    for name, value in results.items():
        note(f"{name:40s} {value:.4f}")
    return 0


def _results(
    config: RunConfig, prepared: Prepared, model_path: str, folder: Path | None
) -> dict[str, float]:
    """The evaluation's, by processes that have ended when it returns."""
    # A checkpoint holds the learner's sharded state, which only its ranks can publish from.
    learner = folder is not None
    size = stored_bytes(config, prepared.tokenizer) if learner else 0
    with connected(config, learner=learner, store_bytes=size):
        config = with_drafts(config, prepared, note)
        session = Session(
            config, model_path, pad_id=prepared.pad_id, note=note, with_learner=learner
        )
        try:
            return asyncio.run(_evaluate(config, session, prepared, folder))
        finally:
            session.close()


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
    return await evaluate_alone(evaluator, fleet, version, config.cluster.heartbeat_s)


def to_evaluate(config: RunConfig, named: str | None, model_named: bool) -> tuple[str, Path | None]:
    """(starting model's folder, checkpoint of it or None).

    A model that the command names takes precedence over the run's checkpoints, and so does one of a
    configuration without a run. Raises UserError rather than take another than was meant.
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
