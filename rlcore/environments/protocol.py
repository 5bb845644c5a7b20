"""The protocol of environments, in which a model acts several times and is answered in between.

    reset -> Opening, then for every turn of the model: Action -> step -> Reply, at the end: grade

One instance plays one episode and is then closed. Meanwhile it is alone in its process, so that one
that hangs or dies costs its own episode alone. Messages have OpenAI's form; everything must be
JSON-able. A user's class need not inherit, and has at least reset, step and grade.
"""

from __future__ import annotations

import inspect
import json
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcore.types import FinishReason, Grade, Item, Message


@dataclass(frozen=True, slots=True)
class Opening:
    """The first prompt of an episode, and the tools that the model may call.

    Example: Opening([{"role": "user", "content": "Guess a number from 0 to 9."}])
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()  # {"type": "function", "function": {"name", ...}}
    max_tokens: int | None = None  # of the next turn, where rollout.max_new_tokens allows more


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Example: ToolCall("add", {"a": 1, "b": 2})"""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Action:
    """The model's action in one turn. An environment never receives one that has an `error`.

    Example: Action("Let me compute.", (ToolCall("add", {"a": 1, "b": 2}),))
    """

    text: str  # cut before the first stop string, without special tokens, calls and reasoning
    tool_calls: tuple[ToolCall, ...] = ()
    error: str = ""  # why the turn could not be read; the model receives this sentence
    finish_reason: FinishReason = "stop"
    tokens: tuple[int, int] = (0, 0)  # of the turn's prompt, and sampled in it
    reasoning: str = ""  # the thought before `text`, where the chat template knows thoughts
    whole: str = ""  # all of the turn as text, with its thought and its calls


@dataclass(frozen=True, slots=True)
class Reply:
    """The environment's answer to an action.

    Example: Reply([{"role": "user", "content": "higher"}])
    """

    messages: Sequence[Message] = ()
    over: bool = False  # no further turn; `messages` are then not shown to the model
    # parts of this step: their sums over the episode are reported with the parts of the grade
    parts: Mapping[str, float] = field(default_factory=dict)
    reward: float | None = None  # of this turn; it adds to the grade's reward
    # instead of `messages`: another conversation begins, as a further part of the episode
    opening: Opening | None = None
    # which of the episode's conversations `messages` continue; None: the one of the last turn
    conversation: int | None = None
    max_tokens: int | None = None  # of the next turn, as in `Opening`


class Environment(ABC):
    """Built as Class(**environment.args). An instance that raises, passes its deadline or ends its
    process gives a failed score."""

    # Whether it runs a program of a user's that calls the model, several times at once if it likes
    # (`agents/endpoint.py`). It then has the methods of `Endpoint` in place of `step`, is given
    # turns that cannot be read, as text, and what is left of the program ends with its process,
    # which plays no other episode.
    hosts_program: ClassVar[bool] = False
    # Whether it opens with tools: a chat template that shows them in an unknown form is refused.
    offers_tools: bool = False
    # Whether `grade` asks the grader of the run's task, which is then given texts alone: a task
    # whose grader asks for tokens is refused.
    asks_task: ClassVar[bool] = False
    # Whether its process is confined (`tasks/isolation/confine`) from the first turn on, and plays
    # one episode: for games of other packages, which read what the model says.
    confined: ClassVar[bool] = False

    @abstractmethod
    def reset(self, item: Item, seed: int) -> Opening:
        """Begin the episode of a problem. `seed` is the same for all samples of a group."""

    @abstractmethod
    def step(self, action: Action) -> Reply:
        """Answer one turn of the model. A turn with tool calls is answered by one message of role
        "tool" for each of them: see `rlcore.environments.protocol.answer_calls`."""

    @abstractmethod
    def grade(self) -> Grade:
        """Judge the episode, also one that a limit has ended. May return what a grader may: a
        Grade, a number or (number, parts). A Grade may besides reward every turn that `step` was
        given, which adds to the rewards of its replies."""

    def worked(self) -> str | None:
        """Optional. A good next turn, from which a fresh model learns before the run; None: there
        is none."""
        return None

    def close(self) -> None:
        """Optional. Free what the episode has taken."""
        return None


class Renderer(ABC):
    """Turns the messages of one episode into tokens and the model's tokens into actions.

    What the model sampled is never tokenised again: a prompt begins, bit for bit, with the tokens
    of the turns before it, or a new part of the episode begins.
    """

    @abstractmethod
    def open(self, opening: Opening) -> list[int]:
        """The first observation of the episode."""

    @abstractmethod
    def parse(self, ids: Sequence[int]) -> Action:
        """The turn that was sampled as `ids`."""

    @abstractmethod
    def extend(self, ids: Sequence[int], messages: Sequence[Message]) -> list[int] | None:
        """`ids`, all tokens of the part so far, and after them what `messages` add; None where the
        prefix cannot be kept."""

    @abstractmethod
    def reopen(self) -> list[int]:
        """The first observation of a new part, after `extend` has returned None."""


Tool = Callable[..., Any]
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}
MAX_ERROR = 500  # characters of an error that a tool's answer shows


def tool_schema(tool: Tool) -> dict[str, Any]:
    """A function in OpenAI's form: its name, the first paragraph of its docstring, its parameters.

    Raises ValueError for a function without a docstring, which the model could not know how to use.
    """
    name = tool.__name__
    if not tool.__doc__:
        raise ValueError(f"tool {name} has no docstring, which is what the model reads of it")
    hints = typing.get_type_hints(tool)
    parameters = inspect.signature(tool).parameters
    properties = {p: _json_type(hints.get(p)) for p in parameters}
    required = [p for p, given in parameters.items() if given.default is inspect.Parameter.empty]
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": inspect.cleandoc(tool.__doc__).split("\n\n")[0],
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def _json_type(hint: Any) -> dict[str, str]:
    known = _JSON_TYPES.get(typing.get_origin(hint) or hint)
    return {"type": known} if known else {}


def as_json(answer: Any) -> str:
    """Return a tool's result as the text that the model reads: text as it is, anything else as
    JSON."""
    return answer if isinstance(answer, str) else json.dumps(answer, default=str)


def answer_calls(
    tools: Mapping[str, Tool], calls: Sequence[ToolCall], *, shown: Callable[[Any], str] = as_json
) -> list[Message]:
    """One message of role "tool" for every call, in order. A tool that raises, or is called in a
    way that it does not accept, answers with its error. `shown`: a tool's answer as text; an
    exception of it is the environment's fault, not the model's."""
    return [{"role": "tool", "name": c.name, "content": _answer(tools, c, shown)} for c in calls]


def _answer(tools: Mapping[str, Tool], call: ToolCall, shown: Callable[[Any], str]) -> str:
    tool = tools.get(call.name)
    if tool is None:
        return f"Error: there is no tool {call.name}; choose one of: {', '.join(tools)}."
    try:
        answer = tool(**call.arguments)
    except Exception as error:  # whatever it is, the model may try again
        return f"Error: {type(error).__name__}: {error}"[:MAX_ERROR]
    return shown(answer)
