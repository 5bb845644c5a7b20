"""What is not yet right for episodes of several turns, refused before anything starts."""

from __future__ import annotations

from rlcore.config.schema import RunConfig
from rlcore.spec import refuse


def check_environment(c: RunConfig) -> None:
    """Raise UserError for what an environment does not go with."""
    _turns(c)
    environment = c.environment
    if not environment.played:
        return
    key = f"environment.name={environment.name}"
    refuse(
        c.mixed,
        f"{key} plays the problems of one task, and task holds tasks by label "
        f"({', '.join(c.tasks)}): choose one task, or environment=none.",
    )
    task = next(iter(c.tasks.values()))
    refuse(
        task.weighed,
        f"{key} grades its episodes itself, and task.rewards or task.grade_weight="
        f"{task.grade_weight} would be ignored: leave both at their defaults, or use "
        "environment=none.",
    )
    for label, actor in c.actor.items():
        # Its rule treats what was sampled as no prompt; of a later turn that is the first turns.
        refuse(
            actor.kind == "sparse",
            f"{key} does not go with actor.{label}.kind=sparse, whose attention and the learner's "
            "tell a prompt from one response: use actor=bf16 or fp8, or environment=none.",
        )
    _endpoint(c)
    a = c.algorithm
    refuse(
        a.overlong_share > 0,
        f"{key} does not go with algorithm.overlong_share={a.overlong_share}, which measures an "
        "episode by rollout.max_new_tokens, the limit of one turn: leave it 0.",
    )
    refuse(
        environment.step_timeout_s > environment.episode_timeout_s,
        f"environment.step_timeout_s={environment.step_timeout_s:g} is above "
        f"environment.episode_timeout_s={environment.episode_timeout_s:g}, which ends the episode "
        "first: lower the first or raise the second.",
    )


def _endpoint(c: RunConfig) -> None:
    """What a program that calls the model as an endpoint does not go with."""
    if c.environment.name != "endpoint":
        return
    key = "environment.name=endpoint"
    refuse(
        c.model.path is None,
        f"{key} needs a model whose tokenizer has a chat template, which a fresh model of an "
        "alphabet has not: set model.path (model=smollm2).",
    )
    refuse(
        c.model.chat_template == "off",
        f"{key} does not go with model.chat_template=off, which would join the messages of a "
        "program without their roles: use model.chat_template=auto.",
    )
    refuse(
        c.algorithm.turn_share > 0,
        f"{key} rewards whole episodes, so that algorithm.turn_share={c.algorithm.turn_share:g} "
        "would have no rewards of turns: leave it 0.",
    )


def _turns(c: RunConfig) -> None:
    """What advantages by turn do not go with."""
    a = c.algorithm
    key = f"algorithm.turn_share={a.turn_share:g}"
    refuse(
        a.turn_share == 0 and a.turn_discount != 1,
        f"algorithm.turn_discount={a.turn_discount:g} is of algorithm.turn_share, which is 0, so "
        "that it would be ignored: leave it at 1, or set algorithm.turn_share above 0.",
    )
    if not a.turn_share:
        return
    refuse(
        not c.environment.played,
        f"{key} shares an episode's reward between its turns, and without an environment every "
        "episode is one turn: leave it 0, or choose an environment.",
    )
    for label, spec in c.correction.chosen().items():
        refuse(
            bool(spec.replaces_advantage),
            f"{key} would be ignored: correction={label} replaces all advantages by its own of the "
            "whole episode: leave it 0, or use another correction.",
        )
    refuse(
        a.dynamic_sampling,
        f"{key} does not go with algorithm.dynamic_sampling=true, which filters groups of equal "
        "rewards although their turns may differ: leave one of them off.",
    )
