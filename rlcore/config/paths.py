"""Paths of a run, made absolute once: processes on other nodes have other working directories."""

from __future__ import annotations

import os
from typing import TypeVar

from rlcore.config.schema import EvalTask, RunConfig

AnyTask = TypeVar("AnyTask", bound=EvalTask)
FILES = ("train_path", "heldout_path")  # task arguments that name a file


def absolute(config: RunConfig) -> RunConfig:
    """The same run with every path resolved against this process's working directory."""
    model = config.model
    warmup = model.warmup and model.warmup.model_copy(update={"cache_dir": os.path.abspath(model.warmup.cache_dir)})
    model = model.model_copy(update={"path": model.path and os.path.abspath(model.path), "warmup": warmup})
    actors = {
        label: a.model_copy(update={"draft_path": a.draft_path and os.path.abspath(a.draft_path)})
        for label, a in config.actor.items()
    }
    tasks = {label: _task(task) for label, task in config.evaluation.tasks.items()}
    evaluation = config.evaluation.model_copy(update={"tasks": tasks})
    return config.model_copy(
        update={
            "run_dir": os.path.abspath(config.run_dir),
            "model": model,
            "actor": actors,
            "task": _task(config.task),
            "evaluation": evaluation,
        }
    )


def _task(task: AnyTask) -> AnyTask:
    args = dict(task.args)
    for name in FILES:
        if isinstance(args.get(name), str):
            args[name] = os.path.abspath(args[name])
    if isinstance(args.get("grader"), str):
        args["grader"] = _code(args["grader"])
    return task.model_copy(update={"name": _code(task.name), "args": args})


def _code(name: str) -> str:
    """ "path/to/file.py:Object" with its file made absolute; anything else as it is."""
    file, colon, thing = name.rpartition(":")
    return f"{os.path.abspath(file)}:{thing}" if colon and file.endswith(".py") else name
