"""Prompts and graders, one file a task. `make_task` is the only way in; tasks are imported when they are named."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

from rlcore.errors import UserError
from rlcore.interfaces import Split, Task
from rlcore.tasks.arguments import ArgumentError, LoadError, load_object

TASKS: dict[str, str] = {
    "arithmetic": "rlcore.tasks.arithmetic:Arithmetic",
    "countdown": "rlcore.tasks.countdown:Countdown",
    "digits": "rlcore.tasks.digits:Digits",
    "file": "rlcore.tasks.file:FileTask",
    "gsm8k": "rlcore.tasks.gsm8k:Gsm8k",
    "leetcode": "rlcore.tasks.code:Leetcode",
    "math": "rlcore.tasks.math:Math",
    "mbpp": "rlcore.tasks.code:Mbpp",
    "sudoku4x4": "rlcore.tasks.sudoku4x4:Sudoku4x4",
}


def make_task(name: str, args: Mapping[str, Any], *, label: str | None = None, key: str = "task") -> Task:
    """Build a task and validate its arguments and data.

    `name` is a key of `TASKS`, or "package.module:Class" or "path/to/file.py:Class" for a user's own. `label` (default:
    the name, or the class name in lower case) becomes `task.name`, the first part of its prompt ids. `key` is the
    config key that the user wrote this under. Raises UserError naming `<key>.name` or `<key>.args.<argument>`.
    """
    if name not in TASKS and ":" not in name:
        raise UserError.choice(f"{key}.name", name, [*sorted(TASKS), "package.module:Class", "path/to/file.py:Class"])
    label = label or (name if name in TASKS else name.rpartition(":")[2].lower())
    if not label or "/" in label:
        raise UserError(f"{key}: the label {label!r} of a task must not be empty or contain '/'.")
    try:
        cls = load_object(TASKS.get(name, name))
    except LoadError as error:
        raise UserError(f"{key}.name={name} {error}") from error
    _check_names(cls, name, args, key)
    try:
        task = cls(**args)
    except ArgumentError as error:
        raise UserError(error.sentence(f"{key}.args")) from error
    task.name = label
    return cast(Task, task)


def _check_names(cls: type, name: str, args: Mapping[str, Any], key: str) -> None:
    known: dict[str, bool] = {}  # argument -> is it required
    for base in cls.__mro__:  # a constructor that takes **keywords hands them on to its base
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]  # type: ignore[misc]
        named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        known = {p.name: p.default is p.empty for p in named} | known
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    for argument, value in args.items():
        if argument not in known:
            raise UserError.choice(f"{key}.args.{argument}", value, known, f"task {name} has no such argument")
    for argument, required in known.items():
        if required and argument not in args:
            listed = ", ".join(known)
            raise UserError(f"{key}.args.{argument} is missing: task {name} needs it; its arguments are: {listed}.")


def format_prompt_id(label: str, split: Split, index: int) -> str:
    """The stable name of a problem: "<label>/<split>/<index>"."""
    return f"{label}/{split}/{index}"


def parse_prompt_id(prompt_id: str) -> tuple[str, Split, int]:
    """(label, split, index) of "<label>/<split>/<index>". Raises ValueError for anything else."""
    label, split, index = prompt_id.split("/")
    if not label or split not in ("train", "heldout") or not index.isdecimal():
        raise ValueError(f"not a prompt id: {prompt_id!r}")
    return label, cast(Split, split), int(index)
