"""Paths of a run, made absolute once: processes on other nodes have other working directories."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from rlcore.config.corrections import CorrectionList
from rlcore.config.schema import MixedTask, RunConfig
from rlcore.environments.specs import EnvironmentSpec
from rlcore.rollout.specs import ActorSpec
from rlcore.tasks.rewards.specs import RewardSpec
from rlcore.tasks.specs import EvalTaskSpec, MixedTaskSpec

AnyTask = TypeVar("AnyTask", bound=EvalTaskSpec)
# Arguments of shipped tasks that name a file. A user's own task resolves its own.
FILES = ("train_path", "heldout_path")


def absolute(config: RunConfig) -> RunConfig:
    """The same run with every path resolved against this process's working directory."""
    model, algorithm, learner = config.model, config.algorithm, config.learner
    warmup = model.warmup and model.warmup.model_copy(
        update={"cache_dir": os.path.abspath(model.warmup.cache_dir)}
    )
    tasks = {label: _task(task) for label, task in config.evaluation.tasks.items()}
    names = {key: _code(getattr(algorithm, key)) for key in ("advantage", "loss")}
    update: dict[str, Any] = {
        "run_dir": os.path.abspath(config.run_dir),
        "model": model.model_copy(update={"path": _path(model.path), "warmup": warmup}),
        "actor": {label: _actor(actor) for label, actor in config.actor.items()},
        "correction": _corrections(config.correction),
        "algorithm": algorithm.model_copy(update=names),
        "cluster": config.cluster.model_copy(update={"transport": _code(config.cluster.transport)}),
        "logging": config.logging.model_copy(
            update={"sinks": tuple(_code(name) for name in config.logging.sinks)}
        ),
        "learner": learner.model_copy(
            update={
                "engine": _code(learner.engine),
                "offload": learner.offload.model_copy(
                    update={"nvme_path": _path(learner.offload.nvme_path)}
                ),
            }
        ),
        "task": (
            {label: _task(task) for label, task in config.task.items()}
            if isinstance(config.task, dict)
            else _task(config.task)
        ),
        "environment": _environment(config.environment),
        "evaluation": config.evaluation.model_copy(update={"tasks": tasks}),
    }
    return config.model_copy(update=update)


def _environment(environment: EnvironmentSpec) -> EnvironmentSpec:
    args = dict(environment.args)
    if isinstance(args.get("rewards"), list):  # functions that score a class written for TRL
        args["rewards"] = [_code(str(name)) for name in args["rewards"]]
    if isinstance(args.get("program"), str):  # what environment=endpoint plays
        args["program"] = _code(args["program"])
    name = environment.name and _code(environment.name)
    return environment.model_copy(update={"name": name, "args": args})


def _actor(actor: ActorSpec) -> ActorSpec:
    return actor.model_copy(
        update={"draft_path": _path(actor.draft_path), "engine": _code(actor.engine)}
    )


def _corrections(corrections: CorrectionList) -> CorrectionList:
    entries = tuple(e._replace(name=_code(e.name)) for e in corrections.entries)
    return corrections.model_copy(update={"entries": entries})


def _task(task: AnyTask) -> AnyTask:
    args = dict(task.args)
    for name in FILES:
        if isinstance(args.get(name), str):
            args[name] = os.path.abspath(args[name])
    if isinstance(args.get("grader"), str):
        args["grader"] = _code(args["grader"])
    rewards = {label: _reward(reward) for label, reward in task.rewards.items()}
    update: dict[str, Any] = {"name": _code(task.name), "args": args, "rewards": rewards}
    if isinstance(task, MixedTaskSpec) and task.advantage is not None:
        update["advantage"] = _code(task.advantage)
    if isinstance(task, MixedTask) and task.environment is not None:
        update["environment"] = _environment(task.environment)
    return task.model_copy(update=update)


def _reward(reward: RewardSpec) -> RewardSpec:
    classifier, own = reward.classifier, reward.own
    if classifier is not None:
        classifier = classifier.model_copy(update={"path": os.path.abspath(classifier.path)})
    if own is not None:
        own = own.model_copy(update={"name": _code(own.name)})
    return reward.model_copy(update={"classifier": classifier, "own": own})


def _path(path: str | None) -> str | None:
    return path and os.path.abspath(path)


def _code(name: str) -> str:
    """ "path/to/file.py:Object" with its file made absolute; anything else as it is."""
    file, colon, thing = name.rpartition(":")
    return f"{os.path.abspath(file)}:{thing}" if colon and file.endswith(".py") else name
