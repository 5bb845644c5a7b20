"""What is not yet right for episodes of several turns, refused before anything starts."""

from __future__ import annotations

from rlcore.config.schema import RunConfig
from rlcore.environments.specs import EnvironmentSpec
from rlcore.spec import refuse


def check_environment(c: RunConfig) -> None:
    """Raise UserError for what an environment does not go with."""
    _turns(c)
    for label in c.tasks:
        _section(c, label)
    for label, environment in c.played.items():
        _played(c, label, environment)


def _section(c: RunConfig, label: str) -> None:
    """A task's own section replaces the run's whole, so that one without a name plays nothing."""
    environment, key = c.environment_of(label), c.environment_key(label)
    if key == "environment" or environment.played:
        return
    given = [n for n, v in environment if v != getattr(EnvironmentSpec(), n)]
    refuse(
        bool(given),
        f"{key}.{''.join(given[:1])} is of an environment that has no name: add "
        f"{key}.name=NAME (the section environment is not read beside it).",
    )


def _played(c: RunConfig, label: str, environment: EnvironmentSpec) -> None:
    section, task = c.environment_key(label), c.tasks[label]
    key = f"{section}.name={environment.name}"
    refuse(
        task.weighed,
        f"{key} grades its episodes itself, and {c.task_key(label)}.rewards or "
        f"{c.task_key(label)}.grade_weight={task.grade_weight} would be ignored: leave both at "
        f"their defaults, or use {section}=none.",
    )
    refuse(
        task.grader_text != "clean",
        f"{key} grades its episodes itself, and {c.task_key(label)}.grader_text={task.grader_text} "
        f"would be ignored: leave it clean, or use {section}=none.",
    )
    for actor_label, actor in c.actor.items():
        # A rule for all positions alike is exact over turns. What is prompt differs: to the engine
        # all turns before, to the learner the first observation.
        refuse(
            actor.sparse is not None and not actor.sparse.sparse_prompt,
            f"{key} does not go with actor.{actor_label}.sparse.sparse_prompt=false: of a later "
            "turn, the engine would take the turns before for a dense prompt and the learner would "
            f"not; set it to true, or {section}=none.",
        )
    _endpoint(c, section, environment)
    share = c.algorithm.overlong_share
    refuse(
        share > 0,
        f"{key} does not go with algorithm.overlong_share={share}, which measures an episode by "
        "rollout.max_new_tokens, the limit of one turn: leave it 0.",
    )
    refuse(
        environment.step_timeout_s > environment.episode_timeout_s,
        f"{section}.step_timeout_s={environment.step_timeout_s:g} is above "
        f"{section}.episode_timeout_s={environment.episode_timeout_s:g}, which ends the episode "
        "first: lower the first or raise the second.",
    )


def _endpoint(c: RunConfig, section: str, environment: EnvironmentSpec) -> None:
    """What a program that calls the model as an endpoint does not go with."""
    if environment.name != "endpoint":
        return
    key = f"{section}.name=endpoint"
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
    refuse(
        a.turn_share == 0 and a.credit == "token",
        "algorithm.credit=token is of algorithm.turn_share, which is 0, so that it would be "
        "ignored: leave it at turn, or set algorithm.turn_share above 0.",
    )
    if not a.turn_share:
        return
    refuse(
        not c.played and a.credit == "turn",
        f"{key} shares an episode's reward between its turns, and without an environment every "
        "episode is one turn: leave it 0, choose an environment, or, where a grader rewards single "
        "tokens, algorithm.credit=token.",
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
