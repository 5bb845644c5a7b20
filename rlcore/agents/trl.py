"""Classes written for TRL's `environment_factory`, unchanged.

The protocol is TRL 1.16's (huggingface/trl, trl/trainer/grpo_trainer.py). `reset(**row)` begins an
episode, and every other public method is a tool. A turn without a tool call ends the episode, and
`get_reward()` or reward functions that take `environments` score it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from pydantic import PydanticUserError, TypeAdapter, ValidationError

from rlcore.environments.protocol import Action, Environment, Message, Opening, Reply, answer_calls
from rlcore.environments.specs import EnvironmentSpec
from rlcore.errors import UserError
from rlcore.interfaces import Task
from rlcore.registry import LoadError, load_object
from rlcore.tasks.reward_functions import ABSENT, accepted, required, single
from rlcore.types import Grade, Item

RESERVED = ("reset", "get_reward")


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
        than its hint, as JSON has it: 3 is a float, and "3" is not an int."""
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
    return required(bare.reset)


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
            raise UserError(f"{key} is not a function: name one of the file.")
        absent = required(function) & (set(ABSENT) - {"environments"})
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


RewardFunctions = Mapping[str, Callable[..., Any]]


def trl_maker(cls: type, spec: EnvironmentSpec, task: Task) -> Callable[[], Environment]:
    """A function that builds the adapter of such a class; the class itself is built at reset.

    Raises UserError for a class whose tools, rewards or `reset` rlcore cannot serve.
    """
    key = f"environment.name={spec.name}"
    args = dict(spec.args)
    functions = reward_functions(args.pop("rewards", []), cls.__name__)
    tools = tools_of(cls, key)
    needed = check_class(cls, args, key)
    if needed and task.size("train") != 0:
        columns = row_of(task.item("train", 0))
        missing = sorted(needed - columns.keys())
        if missing:
            raise UserError(
                f"{key}: reset requires {', '.join(missing)}, and a row of task {task.name} has "
                f"{', '.join(columns)}: with task=file, list it in task.args.meta_fields."
            )
    return partial(TrlEnvironment, partial(cls, **args), tools, functions)


def row_of(item: Item) -> dict[str, Any]:
    """A problem as TRL's row: `prompt`, `question`, `answer`, and the item's `meta`, which may
    replace them."""
    return {"prompt": item.opening(), "question": item.question, "answer": item.answer, **item.meta}


class TrlEnvironment(Environment):
    """One episode of an instance that `build` makes."""

    def __init__(
        self,
        build: Callable[[], Any],
        tools: Mapping[str, TrlTool],
        functions: RewardFunctions,
    ) -> None:
        self._build = build
        self._tools = tools
        self.offers_tools = bool(tools)
        self._functions = functions
        self._loop: asyncio.AbstractEventLoop | None = None

    def reset(self, item: Item, seed: int) -> Opening:
        # TRL hands no seed on: what such a class draws at random comes from the global generators,
        # and is to be the same for all samples of a group and after a resume.
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        self._asked = self._answered = 0
        self._row = row_of(item)
        self._instance = self._build()
        seen = self._awaited(self._instance.reset(**accepted(self._instance.reset, self._row)))
        text = "" if seen is None else shown(seen, "reset")
        *before, last = item.opening()
        self._prompt = [*before, {**last, "content": last["content"] + text}]
        self._said: list[Message] = []
        return Opening(self._prompt, [tool.schema for tool in self._tools.values()])

    def step(self, action: Action) -> Reply:
        said: Message = {"role": "assistant", "content": action.text}
        calls = [{"name": c.name, "arguments": dict(c.arguments)} for c in action.tool_calls]
        if not calls:
            self._said.append(said)
            return Reply(over=True)
        said["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        self._asked += len(calls)
        tools = {name: partial(self._called, name) for name in self._tools}
        answers = answer_calls(tools, action.tool_calls, shown=partial(shown, what="a tool"))
        self._said += [said, *answers]
        return Reply(answers)

    def _called(self, name: str, /, **arguments: Any) -> Any:
        self._tools[name].check(arguments)
        answer = self._awaited(getattr(self._instance, name)(**arguments))
        self._answered += 1
        return answer

    def _awaited(self, value: Any) -> Any:
        """`value`, or what a coroutine gives, on one event loop for the whole episode."""
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(_value(value))

    def grade(self) -> Grade:
        rewards: dict[str, Any] = {}
        if hasattr(self._instance, "get_reward"):
            name = type(self._instance).__name__
            rewards[name] = self._awaited(self._instance.get_reward())
        rewards |= {name: self._scored(f) for name, f in self._functions.items()}
        # TRL leaves out what is None
        parts = {name: float(reward) for name, reward in rewards.items() if reward is not None}
        if not parts:
            raise ValueError(f"no reward was given: {', '.join(rewards)} returned None")
        counts = {"tool_calls": self._asked, "failed_calls": self._asked - self._answered}
        return Grade(sum(parts.values()), {**parts, **counts})

    def _scored(self, function: Callable[..., Any]) -> Any:
        """Call a reward function of TRL on a batch of this one episode and return its result."""
        columns = {name: [value] for name, value in self._row.items() if name != "prompt"}
        batch = {"prompts": [self._prompt], "completions": [self._said], **columns}
        batch["environments"] = [self._instance]
        return single(self._awaited(function(**accepted(function, batch))))

    def close(self) -> None:
        """End the event loop."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None


async def _value(awaitable: Any) -> Any:
    return await awaitable


def shown(value: Any, what: str) -> str:
    """A value as text, as TRL writes it. Raises ValueError for content that is not text."""
    if not isinstance(value, list) or not all(isinstance(v, dict) and "type" in v for v in value):
        return str(value)
    other = [block["type"] for block in value if block["type"] != "text"]
    if other:
        raise ValueError(f"{what} returned content of type {other[0]}; rlcore trains on text alone")
    return "".join(block["text"] for block in value)
