"""`task` with several tasks: how `task=[a,b]` becomes sections by label.

`task=a` fills `task` itself with the keys of one task. A list, even of one, fills `task.LABEL`, and
so does an option whose file holds tasks by label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from rlcore.config.schema import task_form
from rlcore.config.sentences import closest
from rlcore.errors import UserError
from rlcore.spec import refuse
from rlcore.tasks.specs import TaskSpec

GROUP = "task"


def names_several(override: Override) -> bool:
    """Whether a selection is a list of tasks."""
    chosen = override.key_or_group == GROUP and not override.package
    return chosen and isinstance(override.value(), list)


def selected(selections: Sequence[Override]) -> list[str]:
    """The options of `task=[a,b]`, unless a later word chooses a single one."""
    own = [o for o in selections if o.key_or_group == GROUP and not o.package]
    chosen = own[-1].value() if own else None
    return [str(option) for option in chosen] if isinstance(chosen, list) else []


def composed(before: Any, options: Mapping[str, Path]) -> DictConfig:
    """`task` of a run that selects several. `before`: what the rest of the configuration, such as
    an experiment, says of `task`; what it says of a selected label counts, what it says of a single
    task or of other labels does not. `options`: their files."""
    tasks: dict[str, Any] = {}
    for option, file in options.items():
        cfg = OmegaConf.load(file)
        assert isinstance(cfg, DictConfig)
        several = task_form(cfg) == "several"
        own = dict(cfg.items_ex(resolve=False)) if several else {option.rpartition("/")[2]: cfg}
        for label, section in own.items():
            name = str(label)
            refuse(
                name in tasks,
                f"task=[{','.join(options)}] has two tasks of the label {name}: leave one out, "
                "and give it another label, '+task.LABEL={name: ..., args: {...}}'.",
            )
            tasks[name] = section
    if isinstance(before, DictConfig) and task_form(before) == "several":
        for label in tasks.keys() & before.keys():
            tasks[label] = OmegaConf.merge(tasks[label], before[label])
    return OmegaConf.create(tasks)


def name_environments(cfg: DictConfig, options: Mapping[str, Path]) -> None:
    """Replace `task.LABEL.environment=NAME` by the option of that name, or by a user's own class.
    `options`: the files of the group environment."""
    for label in labels(cfg).get(GROUP, ()):
        section = cfg[GROUP][label]
        name = section.get("environment") if isinstance(section, DictConfig) else None
        if not isinstance(name, str):
            continue
        if ":" in name:
            section["environment"] = {"name": name}
            continue
        if name not in options:
            choices = [*options, "path/to/file.py:Class"]
            key = f"task.{label}.environment"
            raise UserError.choice(key, name, choices, closest(name, options))
        section["environment"] = OmegaConf.load(options[name])


def keep_one(task: Any) -> None:
    """Drop what an experiment says of labels, where its user chooses a single task."""
    if isinstance(task, DictConfig) and task_form(task) == "one":
        for key in [k for k in task if k not in TaskSpec.model_fields]:
            if isinstance(task.get(key), DictConfig):
                del task[key]


def labels(cfg: DictConfig) -> dict[str, list[str]]:
    """{"task": its labels} of a run with several tasks, else nothing."""
    task = cfg.get(GROUP)
    if not isinstance(task, DictConfig) or task_form(task) == "one":
        return {}
    return {GROUP: [str(label) for label in task]}


def require_label(override: Override, known: Sequence[str]) -> None:
    """Raise UserError for a key of a single task in a run with several."""
    _, *rest = override.key_or_group.split(".")
    refuse(
        bool(rest) and rest[0] in TaskSpec.model_fields and rest[0] not in known,
        f"{override.input_line} is a key of a run with one task, and this one has "
        f"task=[{','.join(known)}]: write task.LABEL.{'.'.join(rest)} with one of these labels.",
    )
