"""`rlcore train model=M data=D reward=R`: three words for a model, rows and a reward of one's own,
and the settings that they stand for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlcore.config.groups import groups
from rlcore.errors import UserError
from rlcore.files import HUB_NAME

DATA, REWARD = "data", "reward"


def named(words: Sequence[str], own: Mapping[str, str], config_dir: str | None) -> list[str] | None:
    """The words with these three in place of what they stand for, or None where none is given.

    `words`: settings of a run; `own`: data= and reward=. A reward is FILE.py:FUNCTION,
    MODULE:FUNCTION, or a shipped task that grades rows, such as gsm8k. Raises UserError.
    """
    options = groups(config_dir)
    model = _model(words, options["model"])
    if model is None and DATA not in own and REWARD not in own:
        return None
    given = {word.partition("=")[0] for word in words}
    found = [] if model is None else ["model=path", f"model.path={model}"]
    reward = own.get(REWARD)
    if reward is not None and reward in options["task"]:
        found.append(f"task={reward}")
    elif reward is not None or DATA in own:
        found += [] if "task" in given else ["task=file"]
        found += [] if reward is None else [f"task.args.grader={_function(reward)}"]
    if DATA in own:
        found.append(f"task.args.train_path={own[DATA]}")
    return [*found, *(word for word in words if word != f"model={model}")]


def _model(words: Sequence[str], options: Mapping[str, Path]) -> str | None:
    """The value of model= if it is a folder or a name of the hub, and no option."""
    values = [word.partition("=")[2] for word in words if word.startswith("model=")]
    value = values[-1] if values else None
    if value is None or value in options:
        return None
    if os.path.isdir(value) or "/" in value or HUB_NAME.fullmatch(value):
        return value
    return None


def _function(reward: str) -> str:
    file, colon, name = reward.rpartition(":")
    if not colon or not file or not name:
        raise UserError(
            f"reward={reward} is not accepted: give FILE.py:FUNCTION, MODULE:FUNCTION, or a task "
            "that grades rows, such as gsm8k or math."
        )
    return reward
