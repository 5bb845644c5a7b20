"""Renderers: plain text, and any Hugging Face chat template; worked episodes as training text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlcore.environments.protocol import Action, Environment, Message, Opening, Renderer, ToolCall
from rlcore.environments.specs import EnvironmentJob, EnvironmentSpec
from rlcore.errors import UserError
from rlcore.models.specs import TemplateSpec
from rlcore.models.text import (
    Spelled,
    control_ids,
    decode_response,
    encode_opening,
    encode_text,
    plain_text,
    uses_template,
    with_system,
)
from rlcore.seeding import derive_seed
from rlcore.types import Item

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FORM = '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'


def make_renderer(tokenizer: Any, template: TemplateSpec, stop: Sequence[str] = ()) -> Renderer:
    """The renderer of one episode, by the rule of `models.text.encode_prompt`: the tokenizer's chat
    template if it has one and `chat_template` is not "off"."""
    chat = uses_template(tokenizer, template)
    renderer = ChatRenderer if chat else PlainRenderer
    return renderer(tokenizer, template, tuple(stop))


def check_template(spec: EnvironmentSpec, tokenizer: Any, template: TemplateSpec) -> None:
    """Raise UserError for an environment whose messages need a chat template, without one."""
    if spec.name == "endpoint" and not uses_template(tokenizer, template):
        raise UserError(
            "environment.name=endpoint needs a tokenizer with a chat template, and that of "
            "model.path has none: choose a chat model."
        )


class PlainRenderer(Renderer):
    """The text of messages, one after the other. A turn of the model ends with its end-of-sequence
    token, a stop string or its length, and what follows is put behind it as it is."""

    def __init__(self, tokenizer: Any, template: TemplateSpec, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._control_tokens = template.control_tokens
        self._system_prompt = template.system_prompt
        self._stop = stop

    def open(self, opening: Opening) -> list[int]:
        if opening.tools:
            raise ValueError("tools need a tokenizer with a chat template, which describes them")
        text = plain_text(with_system(opening.messages, self._system_prompt))
        return encode_opening(self._tokenizer, text, self._control_tokens)

    def _encode(self, text: str) -> list[int]:
        return encode_text(self._tokenizer, text, self._control_tokens)

    def parse(self, ids: Sequence[int]) -> Action:
        return Action(_cut(decode_response(self._tokenizer, ids), self._stop))

    def extend(self, ids: Sequence[int], messages: Sequence[Message]) -> list[int] | None:
        return [*ids, *self._encode("".join(m["content"] for m in messages))]

    def reopen(self) -> list[int]:
        raise RuntimeError("plain text always keeps its prefix")


class ChatRenderer(Renderer):
    """A tokenizer's own chat template, whatever it is.

    After a turn the whole conversation is rendered as text. Where it begins with the text that the
    model has seen, followed by what it said, the rest is tokenised and appended: the tokens so far
    stay. Where the template has rewritten any of it (dropped an earlier `<think>`, say), a new part
    begins with the conversation as the template now gives it. White space that a template strips
    from the ends of an answer is no rewriting.
    """

    def __init__(self, tokenizer: Any, template: TemplateSpec, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._spelled = Spelled(tokenizer, template.control_tokens)
        self._system_prompt = template.system_prompt
        self._stop = stop
        self._messages: list[Message] = []
        self._tools: list[Any] | None = None
        self._text = ""  # of the conversation up to the last answer, as the template renders it
        self._answer: Sequence[int] = ()  # the last turn of the model

    def open(self, opening: Opening) -> list[int]:
        messages = with_system(opening.messages, self._system_prompt)
        self._messages = self._spelled.hidden(messages)
        self._tools = list(opening.tools) or None
        if self._tools and not self._template_shows_tools():
            self._messages.insert(0, {"role": "system", "content": _described(self._tools)})
        return self.reopen()

    def _template_shows_tools(self) -> bool:
        shown = self._rendered()
        tools, self._tools = self._tools, None
        without = self._rendered()
        self._tools = tools
        return shown != without

    def reopen(self) -> list[int]:
        self._text = self._rendered()
        return self._spelled.encode(self._text)

    def _rendered(self) -> str:
        text = self._tokenizer.apply_chat_template(
            self._messages, tools=self._tools, add_generation_prompt=True, tokenize=False
        )
        return str(text)

    def parse(self, ids: Sequence[int]) -> Action:
        self._answer = ids
        text = _cut(decode_response(self._tokenizer, ids), self._stop)
        calls, error = _tool_calls(text) if self._tools else ((), "")
        return Action(_CALL.sub("", text).strip() if calls else text, calls, error)

    def extend(self, ids: Sequence[int], messages: Sequence[Message]) -> list[int] | None:
        said, last = self._answer, int(self._answer[-1])
        # the special token that the last turn ended with; None: it was cut off
        closed = last if last in control_ids(self._tokenizer).values() else None
        if closed is not None:
            said = said[:-1]
        # as it was sampled: tool calls stay in the text
        content = self._tokenizer.decode(list(said), clean_up_tokenization_spaces=False)
        self._messages += [{"role": "assistant", "content": content}]
        self._messages += self._spelled.hidden(list(messages))
        before, now = self._text, self._rendered()
        if not now.startswith(before):
            return None
        rest = _after(now[len(before) :], content)
        suffix = None if rest is None else self._spelled.encode(rest)
        if not suffix or (closed is not None and suffix[0] != closed):
            return None
        self._text = now
        return [*ids, *(suffix if closed is None else suffix[1:])]


def written_call(name: str, arguments: Any) -> str:
    """A tool call as the model writes it: `_FORM`."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _described(tools: Sequence[Any]) -> str:
    """For a template that has no place for tools."""
    listed = "\n".join(json.dumps(tool) for tool in tools)
    return f"You may call these functions:\n{listed}\nTo call one, write {_FORM}"


def _after(text: str, answer: str) -> str | None:
    """Return the text that follows `answer` at the beginning of `text`; None if it does not begin
    with it."""
    for given in (answer, answer.rstrip(), answer.lstrip(), answer.strip()):
        if text.startswith(given):
            return text[len(given) :]
    return None


def _cut(text: str, stop: Sequence[str]) -> str:
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    return text[: min(found)] if found else text


def _tool_calls(text: str) -> tuple[tuple[ToolCall, ...], str]:
    """(calls, what is wrong with them), written as Hermes does: `_FORM`."""
    calls = []
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
            arguments = call.get("arguments", {})
            calls.append(ToolCall(str(call["name"]), dict(arguments)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return (), (
                f"Error: this tool call cannot be read ({type(error).__name__}: {error}): write "
                f"{_FORM}"
            )
    if not calls and "<tool_call>" in text:
        return (), "Error: the tool call has no </tool_call>."
    return tuple(calls), ""


def worked_episode(
    job: EnvironmentJob, environment: Environment, item: Item, tokenizer: Any
) -> tuple[np.ndarray, np.ndarray]:
    """(token ids [L] int64, which of them a model would have sampled [L] bool) of one episode.

    Every turn ends with the end-of-sequence token. Raises UserError if the environment has no
    worked turns or fails, or its renderer begins a new part.
    """
    try:
        return _worked_episode(job, environment, item, tokenizer)
    except UserError:
        raise
    except Exception as error:  # of any kind: it is a user's own code
        raise UserError(
            f"environment.name={job.environment.name} raised {type(error).__name__}: {error} in a "
            f"worked episode of {item.prompt_id}: correct it, or set model.path to a trained model."
        ) from error


def _worked_episode(
    job: EnvironmentJob, environment: Environment, item: Item, tokenizer: Any
) -> tuple[np.ndarray, np.ndarray]:
    renderer = make_renderer(tokenizer, job.template, job.stop)
    seed = derive_seed(job.run_seed, "environment", "worked", item.prompt_id)
    ids = renderer.open(environment.reset(item, seed))
    sampled = [False] * len(ids)
    for _ in range(job.environment.max_turns):
        worked = getattr(environment, "worked", lambda: None)()
        if worked is None:
            raise UserError(
                f"environment.name={job.environment.name} has no worked turns to warm up on: set "
                "model.path to a trained model."
            )
        turn = [*tokenizer.encode(worked, add_special_tokens=False), tokenizer.eos_token_id]
        renderer.parse(turn)
        ids, sampled = [*ids, *turn], sampled + [True] * len(turn)
        reply = environment.step(Action(worked))
        if reply.over:
            break
        extended = renderer.extend(ids, reply.messages)
        if extended is None or extended[: len(ids)] != ids:
            raise UserError(
                "model.chat_template=auto rewrites earlier turns, so that a worked episode is no "
                "single sequence: set model.path to a trained model."
            )
        sampled += [False] * (len(extended) - len(ids))
        ids = extended
    getattr(environment, "close", lambda: None)()
    return np.array(ids, np.int64), np.array(sampled, bool)
