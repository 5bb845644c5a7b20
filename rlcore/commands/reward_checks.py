"""What rewards beside a task's own grader need on this machine, checked before anything starts."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

from rlcore.config.rewards import rewards
from rlcore.config.schema import RunConfig
from rlcore.errors import UserError
from rlcore.tasks.rewards.endpoint import api_key
from rlcore.tasks.rewards.specs import LeanSpec
from rlcore.tasks.rewards.weighted import own_reward


def check_rewards(config: RunConfig) -> None:
    """Raise UserError for a key that the environment does not have, a folder without a model, or a
    class of a user's own that cannot be built. It is built once, and closed.

    No address is asked: a service may come up later than the run.
    """
    for key, reward in rewards(config):
        if reward.endpoint is not None:
            api_key(key, reward.endpoint)
        if reward.own is not None:
            own_reward(key, reward.own).close()
        if reward.classifier is not None:
            folder = Path(reward.classifier.path)
            if not (folder / "config.json").is_file():
                raise UserError(
                    f"{key}.path={folder} holds no config.json: give a local Hugging Face folder "
                    "of a sequence classifier."
                )


def ask_lean_servers(config: RunConfig) -> None:
    """Raise UserError if a Lean server of a run does not answer.

    Unlike other services it is no service that may come later: it takes minutes to load its
    library, and without it no sample has a reward.
    """
    for key, reward in rewards(config):
        if reward.lean is not None:
            _ask(key, reward.lean)


def _ask(key: str, spec: LeanSpec) -> None:
    secret = api_key(key, spec)
    request = urllib.request.Request(f"{spec.url.rstrip('/')}/health")
    if secret:
        request.add_header("Authorization", f"Bearer {secret}")
    try:
        with urllib.request.urlopen(request, timeout=spec.start_timeout_s):
            return
    except urllib.error.HTTPError as error:
        why = f"answers status {error.code}"
        if error.code in (401, 403):
            why += f" (its key is that of {key}.api_key_env={spec.api_key_env})"
    except (OSError, ValueError) as error:  # refused, unknown host, no answer in time, no HTTP
        why = f"does not answer: {error}"
    raise UserError(
        f"{key}.url={spec.url} {why.replace(secret, '***') if secret else why}; start a Lean "
        "server there (project-numina/kimina-lean-server) or name another."
    )
