"""Tools of an environment: documented functions, their schemas, and answers to calls of them."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlcore.environments.protocol import Message, ToolCall

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
    """What a tool has returned, as the model reads it: text as it is, anything else as JSON."""
    return answer if isinstance(answer, str) else json.dumps(answer, default=str)


def answer_calls(
    tools: Mapping[str, Tool], calls: Sequence[ToolCall], *, shown: Callable[[Any], str] = as_json
) -> list[Message]:
    """One message of role "tool" for every call, in order. A tool that raises, or is called in a
    way that it does not accept, answers with its error. `shown`: a tool's answer as text; what it
    raises is the environment's fault, not the model's."""
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
