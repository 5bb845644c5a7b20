"""The settings that a run cannot change when it goes on from a checkpoint.

Every key of the schema either stands here or may change; `tests/config/test_config_resuming.py`
holds the list of those that may, so that a new key is put on one side or the other. A plan and a
mixture of tasks check themselves what they can continue from (`Plan.check_resume`,
`Mixture.restore`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlcore.config.schema import RunConfig
from rlcore.spec import refuse

_PROBLEMS = "problems that the checkpoint counts, remembers and has in flight would be others"
_ASKED = "samples of one prompt would answer different questions"
_MODEL = "the checkpoint goes on with the model that it was made of"
_WEIGHTS = "the checkpoint's weights and optimizer state are of these"
_SAMPLED = "samples in the checkpoint's buffer were drawn otherwise than the learner would assume"

# Keys of the schema, with * for a label: a label that only one of the two has is not compared.
# A key that stands for a mapping stands for all below it.
FIXED = {
    "seed": _PROBLEMS,
    "model.path": _MODEL,
    "model.fresh": _MODEL,
    "model.diffusion": _SAMPLED,
    "model.warmup.steps": _MODEL,
    "model.warmup.batch_size": _MODEL,
    "model.warmup.lr": _MODEL,
    "model.warmup.precision": _MODEL,
    "model.warmup.lr_warmup_steps": _MODEL,
    "model.warmup.lr_schedule": _MODEL,
    "model.chat_template": _ASKED,
    "model.chat_template_args": _ASKED,
    "model.tool_parser": _ASKED,
    "model.system_prompt": _ASKED,
    "model.control_tokens": _ASKED,
    "task.name": _PROBLEMS,
    "task.args": _PROBLEMS,
    "task.overlong_rows": _PROBLEMS,
    "task.*.name": _PROBLEMS,
    "task.*.args": _PROBLEMS,
    "task.*.overlong_rows": _PROBLEMS,
    "task.*.temperature": _SAMPLED,
    "task.*.environment.name": _ASKED,
    "task.*.environment.args": _ASKED,
    "environment.name": _ASKED,
    "environment.args": _ASKED,
    "actor.*.draft_path": _WEIGHTS,
    "actor.*.draft_fresh": _WEIGHTS,
    "rollout.temperature": _SAMPLED,
    "rollout.top_p": _SAMPLED,
    "rollout.top_k": _SAMPLED,
    "rollout.min_p": _SAMPLED,
    "schedule.lag": "batches in the checkpoint's buffer have the age that it gave them",
    "correction.dvp.rho": _SAMPLED,
    "actor.*.correction.dvp.rho": _SAMPLED,
    "learner.engine": _WEIGHTS,
    "critic.kind": _WEIGHTS,
    "critic.lora.rank": _WEIGHTS,
    "critic.lora.alpha": _WEIGHTS,
    "critic.lora.targets": _WEIGHTS,
    "learner.router_replay": _SAMPLED,
    "learner.lora.rank": _WEIGHTS,
    "learner.lora.alpha": _WEIGHTS,
    "learner.lora.targets": _WEIGHTS,
    "learner.distill.lora.rank": _WEIGHTS,
    "learner.distill.lora.alpha": _WEIGHTS,
    "learner.distill.lora.targets": _WEIGHTS,
}
# Sections whose presence cannot change; their contents may.
PRESENT = {"learner.draft": _WEIGHTS}
# Arguments of tasks and environments that change neither problem nor question: how an answer is
# judged, which may change as rewards may, and where graders run.
FREE_ARGUMENTS = (
    "confinement",
    "credit",
    "format_reward",
    "heldout_path",
    "heldout_split",
    "memory_mib",
    "timeout_s",
    "url",
)


def check_resume(before: RunConfig, now: RunConfig) -> None:
    """Raise UserError for a setting that a run with a checkpoint cannot go on with.

    `before`: the configuration in the run's config.yaml.
    """
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    for pattern, why in FIXED.items():
        section, star, _ = pattern.partition(".*.")
        if section.startswith("task") and not before.mixed == now.mixed == bool(star):
            continue  # keys of the other form; `Mixture.restore` refuses one where the other was
        for key in _concrete(pattern, old, new):
            _compare(key, _value(old, key), _value(new, key), why, now.run_dir)
    for key, why in PRESENT.items():
        if (_value(old, key) is None) != (_value(new, key) is None):
            _compare(key, _value(old, key), _value(new, key), why, now.run_dir)


# Numbers of threads, by which sums round.
THREADS = ("learner.num_cpus", "learner.max_threads", "actor.*.num_cpus")


def other_threads(before: RunConfig, now: RunConfig) -> str | None:
    """A sentence on a synchronous run that goes on with other numbers of threads, or None: it then
    does not equal the uninterrupted run to the bit."""
    if not (before.schedule.synchronous and now.schedule.synchronous):
        return None
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    changed = [
        f"{key}={_shown(_value(new, key))} (begun with {_shown(_value(old, key))})"
        for pattern in THREADS
        for key in _concrete(pattern, old, new)
        if _value(old, key) != _value(new, key)
    ]
    if not changed:
        return None
    return f"{', '.join(changed)}: sums round otherwise, so this is no exact continuation"


def _compare(key: str, old: Any, new: Any, why: str, run_dir: str) -> None:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        free = FREE_ARGUMENTS if key.endswith(".args") else ()
        for name in sorted({*old, *new} - {*free}):
            _compare(f"{key}.{name}", old.get(name), new.get(name), why, run_dir)
        return
    refuse(
        old != new,
        f"{key}={_shown(new)} cannot be resumed with, since {run_dir} was begun with "
        f"{key}={_shown(old)}: {why}. Resume with that value, or start another run_dir, which may "
        "begin with an export of this run (model.path=FOLDER).",
    )


def _concrete(pattern: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """The keys that a pattern stands for: one for each label that both have."""
    head, star, tail = pattern.partition(".*.")
    if not star:
        yield pattern
        return
    yield from (f"{head}.{label}.{tail}" for label in sorted({*old[head]} & {*new[head]}))


def _value(config: Any, key: str) -> Any:
    """The value of a key; None where a section is null or absent, such as one that is not
    selected."""
    for name in key.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
