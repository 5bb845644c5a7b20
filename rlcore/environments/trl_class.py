"""What is read of a class written for TRL before it is played: its tools, arguments and rewards."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from rlcore.errors import UserError
from rlcore.registry import LoadError, load_object

RESERVED = ("reset", "get_reward")
# What TRL hands to reward functions and an environment's process does not have.
ABSENT = ("completion_ids", "trainer_state", "log_extra", "log_metric")


@dataclass(frozen=True, slots=True)
class TrlTool:
    """A public method as the model sees it, and what its arguments must be.

    Example: tools_of(Game, "environment.name=game.py:Game")["guess"].check({"number": 3})
    """

    schema: dict[str, Any]
    signature: inspect.Signature
    types: Mapping[str, TypeAdapter[Any]]

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raises TypeError for missing or unknown arguments, ValueError for one of another type
        than its hint, as JSON has it: 3 is a float, and "3" is no int."""
        self.signature.bind(**arguments)
        for name, value in arguments.items():
            if name not in self.types:
                continue
            try:
                self.types[name].validate_json(json.dumps(value), strict=True)
            except ValidationError as error:
                raise ValueError(f"argument {name}: {error.errors()[0]['msg']}") from None


def tools_of(cls: type, key: str) -> dict[str, TrlTool]:
    """The tools of a class by name: its public methods but the reserved ones, without an instance.

    Raises UserError, beginning with `key`, for a method that cannot be described to a model.
    """
    # 1 s to import, and only such classes need it
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    bare: Any = object.__new__(cls)
    tools = {}
    for name, _ in inspect.getmembers(cls, predicate=inspect.isfunction):
        if name.startswith("_") or name in RESERVED:
            continue
        method = getattr(bare, name)
        try:
            hints = typing.get_type_hints(method)
            hints.pop("return", None)
            types = {p: TypeAdapter(hint) for p, hint in hints.items()}
            tools[name] = TrlTool(get_json_schema(method), inspect.signature(method), types)
        except (
            DocstringParsingException,
            TypeHintParsingException,
            PydanticUserError,
            NameError,
        ) as error:
            why = " ".join(str(error).split())
            raise UserError(
                f"{key}: every public method of a class written for TRL is a tool, and {name} "
                f"cannot be described to the model ({why}): give it type hints and a docstring "
                "with Args, or a name that begins with _."
            ) from error
    return tools


def check_class(cls: type, args: Mapping[str, Any], key: str) -> set[str]:
    """The columns without which its `reset` cannot be called.

    Raises UserError if it cannot be built with `args`.
    """
    try:
        inspect.signature(cls).bind(**args)
    except TypeError as error:
        raise UserError(
            f"environment.args={dict(args)} does not suit {key}: {error} (TRL builds such a class "
            "without arguments; rewards names reward functions)."
        ) from error
    bare: Any = object.__new__(cls)  # so that `self` is bound
    return _required(inspect.signature(bare.reset).parameters.values())


def reward_functions(names: Any, class_name: str) -> dict[str, Callable[..., Any]]:
    """The functions of environment.args.rewards by their own names. Raises UserError."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise UserError(
            f"environment.args.rewards={names} is not accepted: give a list of functions, each "
            "package.module:function or path/to/file.py:function."
        )
    functions: dict[str, Callable[..., Any]] = {}
    for name in names:
        key = f"environment.args.rewards={name}"
        try:
            function = load_object(str(name))
        except LoadError as error:
            raise UserError(f"{key} {error}") from error
        if not inspect.isroutine(function):
            raise UserError(f"{key} is not a function.")
        absent = _required(inspect.signature(function).parameters.values()) & set(ABSENT)
        if absent:
            raise UserError(
                f"{key} requires {', '.join(sorted(absent))}, which only TRL's trainer has: a "
                "reward function is given prompts, completions, environments and the columns."
            )
        title = function.__name__
        if title in functions or title == class_name:
            raise UserError(f"{key} has a name that another reward has: rename one of them.")
        functions[title] = function
    return functions


def _required(parameters: typing.Iterable[inspect.Parameter]) -> set[str]:
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return {p.name for p in parameters if p.default is p.empty and p.kind not in variable}


def accepted(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the keyword arguments that a function takes."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(values)
    return {name: value for name, value in values.items() if name in parameters}
