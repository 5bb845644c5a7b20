"""Prompts and graders, one file a task. `make_task` is the entry point; a task's module is imported
when the task is named."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

from rlcore.errors import Faults, UserError
from rlcore.interfaces import Split, Task
from rlcore.registry import load_object, resolve
from rlcore.tasks.arguments import ArgumentError
from rlcore.tasks.grades import wants_tokens
from rlcore.tasks.specs import EvalTaskSpec

TASKS: dict[str, str] = {
    "alphabet_sort": "rlcore.tasks.game_problems:AlphabetSort",
    "arithmetic": "rlcore.tasks.arithmetic:Arithmetic",
    "countdown": "rlcore.tasks.countdown:Countdown",
    "digits": "rlcore.tasks.digits:Digits",
    "file": "rlcore.tasks.file:FileTask",
    "gsm8k": "rlcore.tasks.gsm8k:Gsm8k",
    "higher_lower": "rlcore.tasks.game_problems:HigherLowerTask",
    "lean": "rlcore.extras.lean:Lean",
    "leetcode": "rlcore.tasks.code:Leetcode",
    "math": "rlcore.tasks.math:Math",
    "mbpp": "rlcore.tasks.code:Mbpp",
    "metamath": "rlcore.extras.metamath:Metamath",
    "metamath_file": "rlcore.extras.metamath:MetamathFile",
    "progression": "rlcore.tasks.progression:Progression",
    "reasoning_gym": "rlcore.tasks.reasoning_gym:ReasoningGym",
    "stdin_code": "rlcore.tasks.stdin_code:StdinCode",
    "sudoku4x4": "rlcore.tasks.sudoku4x4:Sudoku4x4",
}
ISOLATE = "isolate"


def make_task(
    name: str, args: Mapping[str, Any], *, label: str | None = None, key: str = "task"
) -> Task:
    """Build a task and validate its arguments and data.

    `name` is a key of `TASKS`, or "package.module:Class" or "path/to/file.py:Class" for a user's
    own. `label` (default: the name, or the class name in lower case) becomes `task.name`, the first
    part of its prompt ids. `key` is the config key of the task. The argument `isolate` is of every
    task (`isolation.own`). Raises UserError naming `<key>.name` or `<key>.args.<argument>`.
    """
    cls = resolve(TASKS, name, key=f"{key}.name", like=Task)
    label = label or (name if name in TASKS else name.rpartition(":")[2].lower())
    if not label or "/" in label:
        raise UserError(f"{key}: the label {label!r} of a task must not be empty or contain '/'.")
    own = {argument: value for argument, value in args.items() if argument != ISOLATE}
    _check_names(cls, name, own, key)
    try:
        task = cast(Task, cls(**own))
        task.name = label
        if args.get(ISOLATE, False) is not False:
            from rlcore.tasks.isolation.own import isolate  # imports what few tasks need

            isolate(task, name, own, args[ISOLATE])
    except UserError as error:
        faults = Faults()
        for fault in error.faults:
            if isinstance(fault, ArgumentError):
                fault = UserError(fault.sentence(f"{key}.args"))
            faults.add(fault)
        faults.end()
    return task


def tasks_with_tokens(specs: Mapping[str, EvalTaskSpec]) -> frozenset[str]:
    """Labels of the tasks whose graders ask for the text of every token. Raises UserError."""
    found = set()
    for label, spec in specs.items():
        graders = [resolve(TASKS, spec.name, key="task.name").grade]
        own = spec.args.get("grader")
        if spec.name == "file" and own:
            graders = [load_object(name) for name in ([own] if isinstance(own, str) else own)]
        if any(wants_tokens(grade) for grade in graders):
            found.add(label)
    return frozenset(found)


def _check_names(cls: type, name: str, args: Mapping[str, Any], key: str) -> None:
    known: dict[str, bool] = {}  # argument -> whether it is required
    for base in cls.__mro__:  # a constructor that takes **keywords passes them on to its base
        signature = inspect.signature(base.__init__)  # type: ignore[misc]
        parameters = list(signature.parameters.values())[1:]
        named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        known = {p.name: p.default is p.empty for p in named} | known
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    for argument, value in args.items():
        if argument not in known:
            raise UserError.choice(
                f"{key}.args.{argument}", value, known, f"task {name} has no such argument"
            )
    for argument, required in known.items():
        if required and argument not in args:
            listed = ", ".join(known)
            raise UserError(
                f"{key}.args.{argument} is missing: task {name} needs it; its arguments are: "
                f"{listed}."
            )


def format_prompt_id(label: str, split: Split, index: int) -> str:
    """The stable name of a problem: "<label>/<split>/<index>"."""
    return f"{label}/{split}/{index}"


def parse_prompt_id(prompt_id: str) -> tuple[str, Split, int]:
    """(label, split, index) of "<label>/<split>/<index>". Raises ValueError for anything else."""
    label, split, index = prompt_id.split("/")
    if not label or split not in ("train", "heldout") or not index.isdecimal():
        raise ValueError(f"not a prompt id: {prompt_id!r}")
    return label, cast(Split, split), int(index)


def remarks_of(task: Task) -> list[str]:
    """Lines of a task about its problems, such as how many rows it left out, where it has a method
    `remarks`: for `rlcore try` and dry runs."""
    remarks = getattr(task, "remarks", None)
    return [] if remarks is None else list(remarks())
