"""Rules that join tasks, their rewards and their environments with other packages."""

from __future__ import annotations

from collections.abc import Iterator

from rlcore.config.schema import RunConfig
from rlcore.environments.specs import EnvironmentSpec
from rlcore.objectives.specs import advantage_class
from rlcore.spec import refuse
from rlcore.tasks.rewards.specs import RewardSpec
from rlcore.tasks.specs import EvalTaskSpec, MixedTaskSpec


def _labels(c: RunConfig) -> None:
    for label in c.tasks if c.mixed else ():
        refuse(
            not label.strip() or "/" in label,
            f"task.{label}: the label {label!r} of a task must not be blank or contain '/', since "
            "prompt ids begin with it: choose another.",
        )
    shared = [label for label in c.tasks if label in c.evaluation.tasks]
    refuse(
        bool(shared),
        f"evaluation.tasks.{''.join(shared[:1])} repeats the training task, which is evaluated "
        "anyway: give it another label.",
    )
    unknown = [label for label in c.evaluation.actors if label not in c.actor]
    refuse(
        bool(unknown),
        f"evaluation.actors={list(c.evaluation.actors)} names no actor of this run with "
        f"{''.join(unknown[:1])}: choose among {', '.join(c.actor)}.",
    )
    # A wrong name would only show after the first evaluation, perhaps hours later.
    best = c.checkpoint.keep_best
    places = ["", *(f"@{label}" for label in c.evaluation.actors)]
    starts = [f"eval/{t}{p}/" for t in (*c.tasks, *c.evaluation.tasks) for p in places]
    refuse(
        best is not None and not best.startswith(tuple(starts)),
        f"checkpoint.keep_best={best} is not a held-out result of this run: it must begin with "
        f"{' or '.join(starts)}.",
    )


def _weights(c: RunConfig) -> None:
    tasks = mixed(c)
    refuse(
        bool(tasks) and not any(spec.weight for spec in tasks.values()),
        f"{' '.join(f'task.{label}.weight=0' for label in tasks)} leave nothing to train on: give "
        "one of these tasks a weight above 0.",
    )
    refuse(
        c.schedule.sampling == "by_task" and len(c.tasks) < 2,
        "schedule.sampling=by_task shares the batch between training tasks, and a run with "
        f"task={_shown(c)} has one: choose one of: fifo, uniform, or several tasks, task=[a,b].",
    )


def _lengths(c: RunConfig) -> None:
    max_len = c.model.max_len
    for label, key, tokens in _settings(c, "max_new_tokens"):
        refuse(
            tokens >= max_len,
            f"{key}={tokens} leaves no tokens for a prompt{_of(c, label)}: it must stay below "
            f"model.max_len={max_len}.",
        )
    answers = {f"evaluation.tasks.{t}": own.max_new_tokens for t, own in c.evaluation.tasks.items()}
    for key, most in {"evaluation": c.evaluation.max_new_tokens, **answers}.items():
        refuse(
            most is not None and most >= max_len,
            f"{key}.max_new_tokens={most} leaves no tokens for a prompt: it must stay below "
            f"model.max_len={max_len}.",
        )
    lengths = {str(tokens) for _, _, tokens in _settings(c, "max_new_tokens")}
    refuse(
        c.algorithm.overlong_share > 0 and len(lengths) > 1,
        f"algorithm.overlong_share={c.algorithm.overlong_share} penalises responses near one "
        f"limit, and the tasks have several ({', '.join(sorted(lengths))} max_new_tokens): give "
        "them the same, or leave it 0.",
    )


def _stops(c: RunConfig) -> None:
    for label, spec in c.tasks.items():
        own = getattr(spec, "stop", None) is not None
        refuse(
            "" in c.rollout_of(label).stop,
            f"{f'task.{label}' if own else 'rollout'}.stop holds an empty string, which would end "
            "every response before its first character: leave it out.",
        )


def _group_sizes(c: RunConfig) -> None:
    a = c.algorithm
    for label, key, n in _settings(c, "samples_per_prompt"):
        refuse(
            a.train_on_best is not None and a.train_on_best >= n,
            f"algorithm.train_on_best={a.train_on_best} keeps everything{_of(c, label)}: "
            f"it must be below {key}={n}.",
        )
        kept_by = key if a.train_on_best is None else "algorithm.train_on_best"
        kept = n if a.train_on_best is None else a.train_on_best
        chosen_by, advantage = c.advantage_of(label)
        refuse(
            # A group of one has an advantage of zero: nothing would be learnt, silently.
            advantage_class(advantage).compares_group and kept < 2,
            f"{chosen_by}={advantage} compares the samples of a group, and {kept_by}={kept} "
            f"leaves one: use 2 or more, or {chosen_by}=reinforce.",
        )
        refuse(
            a.dynamic_sampling and n < 2,
            f"algorithm.dynamic_sampling=true filters groups of equal rewards, and {key}={n} makes "
            "every group one: use 2 or more, or dynamic_sampling=false.",
        )
        refuse(
            "pass_k" in advantage_class(advantage).own_settings and a.pass_k > kept,
            f"algorithm.pass_k={a.pass_k} needs as many samples of a prompt, and {kept_by}={kept}: "
            f"use at most {kept}.",
        )


def mixed(c: RunConfig) -> dict[str, MixedTaskSpec]:
    """The tasks of a run with several, by label; nothing for a run with one."""
    return {label: s for label, s in c.tasks.items() if isinstance(s, MixedTaskSpec)}


def _settings(c: RunConfig, name: str) -> Iterator[tuple[str, str, int]]:
    """(label, key, value) of a setting of `rollout` that tasks may have themselves."""
    for label, spec in c.tasks.items():
        own = getattr(spec, name, None) is not None
        yield (
            label,
            f"task.{label}.{name}" if own else f"rollout.{name}",
            getattr(c.rollout_of(label), name),
        )


def _of(c: RunConfig, label: str) -> str:
    return f" of task.{label}" if c.mixed else ""


def _shown(c: RunConfig) -> str:
    return f"[{','.join(c.tasks)}]" if c.mixed else "".join(c.tasks)


TASK_RULES = (_labels, _weights, _lengths, _stops, _group_sizes)


def check_environment(c: RunConfig) -> None:
    """Raise UserError for settings that an environment cannot be combined with."""
    _turns(c)
    for label in c.tasks:
        _section(c, label)
    for label, environment in c.played.items():
        _played(c, label, environment)


def _section(c: RunConfig, label: str) -> None:
    """The key of a task's environment. A task's own section replaces the run's whole one, so a
    section without a name plays nothing."""
    environment, key = c.environment_of(label), c.environment_key(label)
    if key == "environment" or environment.played:
        return
    given = [n for n, v in environment if v != getattr(EnvironmentSpec(), n)]
    refuse(
        bool(given),
        f"{key}.{''.join(given[:1])} is of an environment that has no name: add "
        f"{key}.name=NAME (the section environment is not read with it).",
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
    refuse(
        task.overlong_rows != "refuse",
        f"{key} asks its questions while an episode is played, and {c.task_key(label)}."
        f"overlong_rows={task.overlong_rows} is about prompts that are known before a run: leave "
        f"it refuse, or use {section}=none.",
    )
    for actor_label, actor in c.actor.items():
        # A rule for all positions alike is exact over turns. What is prompt differs: to the engine
        # all turns before, to the learner the first observation.
        refuse(
            actor.sparse is not None and actor.sparse.needs_prompts,
            f"{key} cannot be combined with actor.{actor_label}.sparse.prompt="
            f"{actor.sparse.prompt if actor.sparse else None}: of a later turn, the engine would "
            "take the turns before for its prompt and the learner would not; set it to sparse, or "
            f"{section}=none.",
        )
    _endpoint(c, section, environment)
    share = c.algorithm.overlong_share
    refuse(
        share > 0,
        f"{key} cannot be combined with algorithm.overlong_share={share}, which measures an "
        "episode by rollout.max_new_tokens, the limit of one turn: leave it 0.",
    )
    refuse(
        environment.step_timeout_s > environment.episode_timeout_s,
        f"{section}.step_timeout_s={environment.step_timeout_s:g} is above "
        f"{section}.episode_timeout_s={environment.episode_timeout_s:g}, which ends the episode "
        "first: lower the first or raise the second.",
    )


def _endpoint(c: RunConfig, section: str, environment: EnvironmentSpec) -> None:
    """Refuse settings that do not combine with a program that calls the model as an endpoint."""
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
        f"{key} cannot be combined with model.chat_template=off, which would join the messages of "
        "a program without their roles: use model.chat_template=auto.",
    )
    refuse(
        c.algorithm.turn_share > 0,
        f"{key} rewards whole episodes, so that algorithm.turn_share={c.algorithm.turn_share:g} "
        "would have no rewards of turns: leave it 0.",
    )


def _turns(c: RunConfig) -> None:
    """Refuse settings that cannot be combined with advantages by turn."""
    a = c.algorithm
    key = f"algorithm.turn_share={a.turn_share:g}"
    refuse(
        a.turn_share == 0 and a.turn_discount != 1,
        f"algorithm.turn_discount={a.turn_discount:g} is of algorithm.turn_share, which is 0, so "
        "that it would be ignored: leave it at 1, or set algorithm.turn_share above 0.",
    )
    refuse(
        a.turn_share == 0 and a.credit == "token" and not c.critic.trained,
        "algorithm.credit=token is of algorithm.turn_share, which is 0, or of a critic, so that it "
        "would be ignored: leave it at turn, or set algorithm.turn_share above 0.",
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
    """Raise UserError for a reward that takes longer than the deadline of its callers, whose key a
    program might read, or that another task needs."""
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
            f"{key}.args.confinement=reduced cannot be combined with "
            f"{''.join(keyed[:1])}.api_key_env: a program that the model wrote might read the key "
            "out of the memory of another process; use confinement=full, or grade the programs in "
            "a run without keys.",
        )


def _lean(key: str, task: EvalTaskSpec) -> None:
    """Require a Lean reward for a task of Lean statements, and the reverse."""
    found = [label for label, reward in task.rewards.items() if reward.lean is not None]
    refuse(
        task.name == "lean" and (not found or task.grade_weight is not None),
        f"{key}.name=lean has no own grader: proofs are judged by a Lean server, "
        f"{key}.rewards.proof.lean.url=http://HOST:PORT, with {key}.grade_weight=null, as "
        "configs/task/lean.yaml has them.",
    )
    refuse(
        bool(found) and task.name != "lean" and ":" not in task.name,
        f"{key}.rewards.{''.join(found[:1])}.lean checks proofs of Lean statements, and "
        f"{key}.name={task.name} has none: use it with task=lean, or with your own task whose "
        "reference answers are Lean sources up to the proof.",
    )
