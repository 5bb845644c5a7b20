"""Probes of chat templates: conversations with a marker in each message, rendered before a run.

A template that drops a role or raises for it would lose what an environment says. Where the words
can be carried by another role they are, and the mapping is stated; where they cannot, the template
is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from rlcore.agents.families import ToolFamily, family_of, refuse_harmony, thoughts_of
from rlcore.environments.protocol import Message
from rlcore.errors import UserError
from rlcore.models.specs import TemplateSpec
from rlcore.models.text import rendered, template_text

# A template is a program and may raise what it likes.
FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
TOOL = {
    "type": "function",
    "function": {
        "name": "toolmarker",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
SYSTEM, DEVELOPER, USER = "system", "developer", "user"


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template as it was probed: which roles it carries, and what becomes of the others."""

    system: str  # "anywhere", "first": leading ones are merged, or "user": no system turns
    developer: bool  # False: as a system message
    tool: bool  # False: as a user message
    repeats: bool  # whether one role may speak twice in a row; False: neighbours are merged
    tools: bool  # whether it shows tools; False: the first message describes them
    calls: str  # "dict" or "text": the form of arguments in `tool_calls`; "": it drops them
    several: bool  # whether it takes several calls in one message
    verbatim: bool  # whether answers of tools may follow a call that stands in the content
    family: ToolFamily | None  # None: tools are shown in a form that is not known
    thoughts: tuple[str, str] | None  # marks around thoughts that the template knows

    def remarks(self) -> list[str]:
        """Return the roles that are mapped, and how, in a few words each."""
        merged = {"first": "later system messages as user", "user": "system as user"}
        found = [merged[self.system]] if self.system in merged else []
        found += [] if self.developer else ["developer as system"]
        found += [] if self.tool else ["answers of tools as user"]
        found += [] if self.repeats else ["neighbours of one role merged"]
        found += [] if self.tools else ["tools described in the first message"]
        return found

    def mapped(self, messages: Sequence[Message], *, begins: bool = True) -> list[Message]:
        """The messages in roles that the template carries. `begins`: they open a conversation."""
        out: list[Message] = []
        for message in messages:
            leads = begins and all(m["role"] == SYSTEM for m in out)
            message = {**message, "role": self._role(message["role"], leads=leads)}
            # "first": what precedes the conversation is one system message
            merges = not self.repeats or (message["role"] == SYSTEM and self.system == "first")
            if out and merges and _joins(out[-1], message):
                message = {**message, "content": f"{out[-1]['content']}\n\n{message['content']}"}
                out[-1] = message
            else:
                out.append(message)
        return out

    def _role(self, role: str, *, leads: bool) -> str:
        if role == DEVELOPER and not self.developer:
            role = SYSTEM
        if role == SYSTEM and (self.system == USER or (self.system == "first" and not leads)):
            return USER
        return USER if role == "tool" and not self.tool else role


def _joins(last: Message, message: Message) -> bool:
    """Return whether two neighbours may become one message."""
    plain = not last.get("tool_calls") and not message.get("tool_calls")
    return plain and last["role"] == message["role"] != "tool"


def probed(tokenizer: Any, settings: TemplateSpec) -> Template:
    """The template of a tokenizer, or of `model.chat_template`.

    Raises UserError for one that does not carry a conversation of user and assistant, for an
    unknown `model.tool_parser`, and for gpt-oss's form.
    """
    text, shown = template_text(tokenizer, settings), template_text(tokenizer, settings, tools=True)
    refuse_harmony(text, settings.tool_parser)
    arguments = json.dumps(settings.chat_template_args, sort_keys=True)
    return _probed(
        tokenizer, (text, shown), settings.chat_template, arguments, settings.tool_parser
    )


@lru_cache(maxsize=16)
def _probed(
    tokenizer: Any, texts: tuple[str, str], name: str, arguments: str, parser: str
) -> Template:
    given = TemplateSpec(chat_template=name, chat_template_args=json.loads(arguments))
    return Probes(tokenizer, given).template(texts, parser)


class Probes:
    """Conversations whose messages hold markers, rendered by one template."""

    def __init__(self, tokenizer: Any, settings: TemplateSpec) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._fault = ""  # of the last conversation

    def template(self, texts: tuple[str, str], parser: str) -> Template:
        """Probe every role, and roles in pairs. Raises UserError."""
        if not self._carries("user", "assistant", "user"):
            raise UserError(
                f"model.chat_template={self._settings.chat_template}: the template does not carry "
                f"a conversation of user, assistant and user ({self._fault}): choose a chat model, "
                "or another template."
            )
        system = self._system()
        lead = () if system == USER else (SYSTEM,)
        repeats = self._carries("user", "user") and self._carries(*lead, "user", "user")
        calls = next((form for form in ("dict", "text") if self._called(form, 1)), "")
        several = bool(calls) and self._called(calls, 2)
        verbatim = self._carries("user", "assistant", "tool") and self._carries(
            "user", "assistant", "tool", "tool", "assistant", "user"
        )
        tool = verbatim or bool(calls)
        tools = self._shows_tools()
        try:
            family = family_of(texts[1], self._tokenizer, parser, shows_tools=tools)
        except UserError:
            if parser != "auto":
                raise
            family = None
        return Template(
            system=system,
            developer=self._carries(DEVELOPER, "user") and system != USER,
            tool=tool,
            repeats=repeats,
            tools=tools,
            calls=calls,
            several=several,
            verbatim=verbatim or not tool,
            family=family,
            thoughts=thoughts_of(texts[0]),
        )

    def _system(self) -> str:
        with_tools = self._carries(SYSTEM, "user", "assistant", "user", tools=True)
        if not (with_tools and self._carries(SYSTEM, "user", "assistant", "user")):
            return USER
        anywhere = self._carries(SYSTEM, SYSTEM, "user") and self._carries(
            SYSTEM, "user", "assistant", SYSTEM, "user"
        )
        return "anywhere" if anywhere else "first"

    def _carries(self, *roles: str, tools: bool = False) -> bool:
        """Return whether every message is in the text, in order."""
        messages: list[Message] = [
            {"role": role, "content": f"marker{at}{role}"} for at, role in enumerate(roles)
        ]
        for message in messages:
            message |= {"name": "toolmarker"} if message["role"] == "tool" else {}
        return self._in_order(messages, [m["content"] for m in messages], tools=tools)

    def _called(self, form: str, count: int) -> bool:
        """Return whether calls in `tool_calls` and the answers to them are in the text."""
        calls, answers, markers = [], [], []
        for at in range(count):
            given: Any = {"key": f"value{at}marker"}
            function = {"name": "toolmarker", "arguments": given}
            if form == "text":
                function["arguments"] = json.dumps(given)
            name = f"c{at:08d}"
            calls.append({"id": name, "type": "function", "function": function})
            answer = {"role": "tool", "content": f"answer{at}marker", "name": "toolmarker"}
            answers.append({**answer, "tool_call_id": name})
            markers.append(f"value{at}marker")
        said = {"role": "assistant", "content": "", "tool_calls": calls}
        messages: list[Message] = [{"role": "user", "content": "marker"}, said, *answers]
        markers += [answer["content"] for answer in answers]
        return self._in_order(messages, ["marker", *markers], tools=True)

    def _in_order(self, messages: list[Message], markers: list[str], *, tools: bool) -> bool:
        text, at = self._text(messages, tools=tools), 0
        if text is None:
            return False
        for marker in markers:
            at = text.find(marker, at)
            if at < 0:
                self._fault = f"the text of {marker} is lost"
                return False
            at += len(marker)
        return True

    def _shows_tools(self) -> bool:
        text = self._text([{"role": "user", "content": "marker"}], tools=True)
        return text is not None and "toolmarker" in text

    def _text(self, messages: list[Message], *, tools: bool) -> str | None:
        try:
            return rendered(
                self._tokenizer, messages, self._settings, tools=[TOOL] if tools else None
            )
        except FAULTS as error:
            self._fault = f"{type(error).__name__}: {error}"
            return None
