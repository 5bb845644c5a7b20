"""The settings that a run cannot change when it goes on from a checkpoint.

Each specification names its own (`Spec.fixed`, `Spec.fixed_presence`), a user's correction
included. `tests/config/test_config_resuming.py` lists the settings that may change, so that a new
one is put on one side or the other. A plan and a mixture of tasks check themselves what they can
continue from (`Plan.check_resume`, `Mixture.restore`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlcore.config.schema import RunConfig
from rlcore.config.sentences import specifications
from rlcore.spec import Spec, refuse

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
    found = [dict(specifications(config)) for config in (before, now)]
    for key in found[0] | found[1]:
        if _in_both(key, before, now):
            old, new = (specs.get(key) for specs in found)
            _compare_section(key, old, new, now.run_dir)


# Numbers of threads and kernels, by which sums round.
THREADS = (
    *("learner.num_cpus", "learner.max_threads", "actor.*.num_cpus"),
    "cluster.cpu_fast_paths",
)


def other_threads(before: RunConfig, now: RunConfig) -> str | None:
    """A sentence on a synchronous run that goes on with other numbers of threads, or other
    kernels, or None: it then does not equal the uninterrupted run to the bit."""
    if not (before.schedule.synchronous and now.schedule.synchronous):
        return None
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    changed = [
        f"{key}={_shown(_at(new, key))} (begun with {_shown(_at(old, key))})"
        for pattern in THREADS
        for key in _concrete(pattern, old, new)
        if _at(old, key) != _at(new, key)
    ]
    if not changed:
        return None
    return f"{', '.join(changed)}: sums round otherwise, so this is not an exact continuation"


def _in_both(key: str, before: RunConfig, now: RunConfig) -> bool:
    """Return whether a section is of what both runs train with. A label that only one has, the
    other form of `task` (`Mixture.restore` refuses that) and a measured list are not."""
    section, _, rest = key.partition(".")
    label = rest.partition(".")[0]
    if section == "actor":
        return label in before.actor and label in now.actor
    if section == "task":
        both = label in before.tasks and label in now.tasks
        return before.mixed == now.mixed and (both or not now.mixed)
    return not key.startswith("correction.shadow.")


def _compare_section(key: str, old: Spec | None, new: Spec | None, run_dir: str) -> None:
    """Raise UserError for a difference in what the specifications keep. None: no such section."""
    for spec in (old, new):
        for name, why in spec.kept() if spec is not None else ():
            _compare(
                f"{key}.{name}".lstrip("."), _value(old, name), _value(new, name), why, run_dir
            )
    presence = new.kept(presence=True) if old is not None and new is not None else ()
    for name, why in presence:
        had, has = _value(old, name), _value(new, name)
        if (had is None) != (has is None):
            _compare(f"{key}.{name}", had, has, why, run_dir)


def _value(spec: Spec | None, name: str) -> Any:
    """A setting as it is written to config.yaml; None where the section does not have it."""
    return spec.model_dump(mode="json", include={name}).get(name) if spec is not None else None


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


def _at(config: Any, key: str) -> Any:
    """The value of a key; None where a section is null or absent."""
    for name in key.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
