"""Questions out of a row's column: a text, or the messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.tasks.records import RowError, pick, pick_text
from rlcore.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
COLUMNS = ("question", "prompt", "messages")  # looked for where no column is named


@dataclass(frozen=True, slots=True)
class Asked:
    """What a row asks. Example: Asked("2+2?", ({"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"}), "4")"""

    question: str  # the last message
    messages: tuple[Message, ...] = ()  # (): a single question
    answer: str | None = None  # the last turn, where it is the assistant's


def pick_question(row: dict[str, Any], path: str | None) -> Asked:
    """The question at a dotted path; None: in the first of COLUMNS that the row has.

    A conversation ends with what the model is asked; a last turn of the assistant is its answer.
    Raises RowError.
    """
    field = path or next((name for name in COLUMNS if row.get(name) is not None), None)
    if field is None:
        raise RowError(
            f"it has none of the fields {', '.join(COLUMNS)} (the row has: "
            f"{', '.join(map(str, row))}): name one with task.args.question_field"
        )
    value = _turned(pick(row, field))
    if not isinstance(value, list):
        return Asked(pick_text(row, field))
    messages = [_message(m, f"{field}.{i}") for i, m in enumerate(value)]
    answer = messages.pop()["content"] if len(messages) and _said(messages[-1]) else None
    if not messages:
        raise RowError(f"field {field} holds no message before the assistant's")
    last = messages[-1]
    if last["role"] not in ("user", "tool"):
        raise RowError(f"field {field} ends with a {last['role']} turn: the model is asked nothing")
    if not last["content"].strip():
        raise RowError(f"field {field} ends with an empty {last['role']} turn")
    plain = len(messages) == 1 and set(last) == {"role", "content"} and last["role"] == "user"
    return Asked(last["content"], () if plain else tuple(messages), answer)


def _said(message: Message) -> bool:
    return bool(message["role"] == "assistant")


def _turned(value: Any) -> Any:
    """Messages that Arrow holds by column, {"role": [...], "content": [...]}, one by one."""
    lists = (
        isinstance(value, Mapping) and value and all(isinstance(v, list) for v in value.values())
    )
    if not lists:
        return value
    return [dict(zip(value, turn)) for turn in zip(*value.values())]


def _message(value: Any, where: str) -> Message:
    """One message with a role and a text. Keys that are null, as Arrow fills them, are dropped; the
    others are the template's to read."""
    if not isinstance(value, Mapping):
        raise RowError(f"field {where} is {type(value).__name__}, not a message")
    message = {str(key): part for key, part in value.items() if part is not None}
    role = message.get("role")
    if role not in ROLES:
        raise RowError(
            f"field {where} has role {role!r}, not one of {', '.join(ROLES)} (the message has: "
            f"{', '.join(message) or 'nothing'})"
        )
    return {**message, "content": _text(message, where)}


def _text(message: Message, where: str) -> str:
    content = message.get("content", "" if "tool_calls" in message else None)
    if isinstance(content, Sequence) and not isinstance(content, str):
        kinds = [part.get("type") if isinstance(part, Mapping) else part for part in content]
        if any(kind != "text" for kind in kinds):
            raise RowError(f"field {where} has parts other than text: {kinds}")
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise RowError(f"field {where} has no text as its content")
    return content
