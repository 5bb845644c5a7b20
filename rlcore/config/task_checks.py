"""Rules that join tasks with other rooms: labels, lengths, group sizes, the order of training."""

from __future__ import annotations

from collections.abc import Iterator

from rlcore.config.schema import RunConfig
from rlcore.objectives.registry import advantage_class
from rlcore.spec import refuse
from rlcore.tasks.specs import MixedTaskSpec


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
    # A wrong name would only show after the first evaluation, perhaps hours later.
    best = c.checkpoint.keep_best
    starts = [f"eval/{label}/" for label in (*c.tasks, *c.evaluation.tasks)]
    refuse(
        best is not None and not best.startswith(tuple(starts)),
        f"checkpoint.keep_best={best} is no held-out result of this run: it must begin with "
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
            f"{key}={tokens} leaves no room for a prompt{_of(c, label)}: it must stay below "
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
            a.keep_best is not None and a.keep_best >= n,
            f"algorithm.keep_best={a.keep_best} keeps everything{_of(c, label)}: it must be below "
            f"{key}={n}.",
        )
        kept_by = key if a.keep_best is None else "algorithm.keep_best"
        kept = n if a.keep_best is None else a.keep_best
        chosen_by, advantage = c.advantage_of(label)
        refuse(
            # A group of one has an advantage of zero: nothing would be learnt, silently.
            advantage_class(advantage).compares_group and kept < 2,
            f"{chosen_by}={advantage} compares the samples of a group, and {kept_by}={kept} "
            f"leaves one: use 2 or more, or {chosen_by}=reinforce.",
        )


def mixed(c: RunConfig) -> dict[str, MixedTaskSpec]:
    """The tasks of a run with several, by label; nothing for a run with one."""
    return {label: s for label, s in c.tasks.items() if isinstance(s, MixedTaskSpec)}


def _settings(c: RunConfig, name: str) -> Iterator[tuple[str, str, int]]:
    """(label, key, value) of a setting of `rollout` that tasks may have of their own."""
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
