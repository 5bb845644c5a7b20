"""What rewards beside a task's own grader need on this machine, checked before anything starts."""

from __future__ import annotations

from pathlib import Path

from rlcore.config.rewards import rewards
from rlcore.config.schema import RunConfig
from rlcore.errors import UserError
from rlcore.tasks.rewards.endpoint import api_key


def check_rewards(config: RunConfig) -> None:
    """Raise UserError for a key that the environment does not have, or a folder without a model.

    No address is asked: a service may come up later than the run.
    """
    for key, reward in rewards(config):
        if reward.endpoint is not None:
            api_key(key, reward.endpoint)
        if reward.classifier is not None:
            folder = Path(reward.classifier.path)
            if not (folder / "config.json").is_file():
                raise UserError(
                    f"{key}.path={folder} holds no config.json: give a local Hugging Face folder "
                    "of a sequence classifier."
                )
