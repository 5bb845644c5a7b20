"""Worked episodes: an environment's own turns in place of a model's, to warm a fresh model up."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlcore.environments.protocol import Action, Environment
from rlcore.environments.renderers import make_renderer
from rlcore.environments.specs import EnvironmentJob
from rlcore.errors import UserError
from rlcore.seeding import derive_seed
from rlcore.types import Item


def worked_episode(
    job: EnvironmentJob, environment: Environment, item: Item, tokenizer: Any
) -> tuple[np.ndarray, np.ndarray]:
    """(token ids [L] int64, which of them a model would have sampled [L] bool) of one episode.

    Every turn ends with the end-of-sequence token. Raises UserError if the environment has no
    worked turns or fails, or its renderer begins a new part.
    """
    try:
        return _worked_episode(job, environment, item, tokenizer)
    except UserError:
        raise
    except Exception as error:  # of any kind: it is a user's own code
        raise UserError(
            f"environment.name={job.environment.name} raised {type(error).__name__}: {error} in a "
            f"worked episode of {item.prompt_id}: correct it, or set model.path to a trained model."
        ) from error


def _worked_episode(
    job: EnvironmentJob, environment: Environment, item: Item, tokenizer: Any
) -> tuple[np.ndarray, np.ndarray]:
    renderer = make_renderer(
        tokenizer, chat_template=job.chat_template, system_prompt=job.system_prompt, stop=job.stop
    )
    seed = derive_seed(job.run_seed, "environment", "worked", item.prompt_id)
    ids = renderer.open(environment.reset(item, seed))
    sampled = [False] * len(ids)
    for _ in range(job.environment.max_turns):
        worked = getattr(environment, "worked", lambda: None)()
        if worked is None:
            raise UserError(
                f"environment.name={job.environment.name} has no worked turns to warm up on: set "
                "model.path to a trained model."
            )
        turn = [*tokenizer.encode(worked, add_special_tokens=False), tokenizer.eos_token_id]
        renderer.parse(turn)
        ids, sampled = [*ids, *turn], sampled + [True] * len(turn)
        reply = environment.step(Action(worked))
        if reply.over:
            break
        extended = renderer.extend(ids, reply.messages)
        if extended is None or extended[: len(ids)] != ids:
            raise UserError(
                "model.chat_template=auto rewrites earlier turns, so that a worked episode is no "
                "single sequence: set model.path to a trained model."
            )
        sampled += [False] * (len(extended) - len(ids))
        ids = extended
    getattr(environment, "close", lambda: None)()
    return np.array(ids, np.int64), np.array(sampled, bool)
