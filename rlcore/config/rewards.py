"""Rules that join the rewards beside a task's own grader with the rest of a run."""

from __future__ import annotations

from collections.abc import Iterator

from rlcore.config.schema import RunConfig
from rlcore.spec import refuse
from rlcore.tasks.rewards.specs import RewardSpec
from rlcore.tasks.specs import EvalTaskSpec


def tasks(c: RunConfig) -> dict[str, EvalTaskSpec]:
    """Config key -> task, of every task of a run: those that are trained on first."""
    return {
        **{c.task_key(label): task for label, task in c.tasks.items()},
        **{f"evaluation.tasks.{label}": task for label, task in c.evaluation.tasks.items()},
    }


def rewards(c: RunConfig) -> Iterator[tuple[str, RewardSpec]]:
    """(config key of its kind, reward) of every reward of a run."""
    for key, task in tasks(c).items():
        for label, reward in task.rewards.items():
            yield f"{key}.rewards.{label}.{reward.kind}", reward


def check_rewards(c: RunConfig) -> None:
    """Raise UserError for a reward that outlasts those who wait for it, whose key a program might
    read, or that another task needs."""
    for key, task in tasks(c).items():
        _lean(key, task)
    trained, evaluated = c.schedule.wait_data_timeout_s, c.evaluation.timeout_s
    for key, reward in rewards(c):
        of_training = key.startswith("task.")
        waiting = "schedule.wait_data_timeout_s" if of_training else "evaluation.timeout_s"
        limit = min(trained, evaluated) if of_training else evaluated
        waiting = "evaluation.timeout_s" if limit == evaluated else waiting
        setting = "timeout_s" if reward.classifier else "deadline_s"
        refuse(
            reward.deadline_s >= limit,
            f"{key}.{setting}={reward.deadline_s:g} is not below {waiting}={limit:g}, which would "
            "end the run before the reward counts as failed: lower the first or raise the second.",
        )
    keyed = [key for key, r in rewards(c) if r.endpoint and r.endpoint.api_key_env]
    programs = {key: task.args for key, task in tasks(c).items()}
    played = {c.environment_key(label): spec.args for label, spec in c.played.items()}
    for key, args in {**programs, **played}.items():
        refuse(
            bool(keyed) and args.get("confinement") == "reduced",
            f"{key}.args.confinement=reduced does not go with {''.join(keyed[:1])}.api_key_env: a "
            "program that the model wrote might read the key out of the memory of another "
            "process; use confinement=full, or grade the programs in a run without keys.",
        )


def _lean(key: str, task: EvalTaskSpec) -> None:
    """Statements and who judges their proofs belong together."""
    found = [label for label, reward in task.rewards.items() if reward.lean is not None]
    refuse(
        task.name == "lean" and (not found or task.grade_weight is not None),
        f"{key}.name=lean has no grader of its own: proofs are judged by a Lean server, "
        f"{key}.rewards.proof.lean.url=http://HOST:PORT, with {key}.grade_weight=null, as "
        "configs/task/lean.yaml has them.",
    )
    refuse(
        bool(found) and task.name != "lean" and ":" not in task.name,
        f"{key}.rewards.{''.join(found[:1])}.lean checks proofs of Lean statements, and "
        f"{key}.name={task.name} has none: use it with task=lean, or with a task of your own whose "
        "reference answers are Lean sources up to the proof.",
    )
