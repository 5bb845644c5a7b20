"""What is not yet right for episodes of several turns, refused before anything starts."""

from __future__ import annotations

from rlcore.config.schema import RunConfig
from rlcore.spec import refuse


def check_environment(c: RunConfig) -> None:
    """Raise UserError for what an environment does not go with."""
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
