"""Renderers: plain text, and any Hugging Face chat template; worked episodes as training text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlcore.agents.families import HERMES, Said, read_turn
from rlcore.agents.templates import probed
from rlcore.environments.protocol import Action, Environment, Message, Opening, Renderer
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
    rendered,
    uses_template,
    with_system,
)
from rlcore.seeding import derive_seed
from rlcore.types import Item

UNKNOWN = (
    "model.tool_parser=auto does not know the form in which the chat template shows tools: name a "
    "family, or a tool parser of vLLM."
)


def make_renderer(tokenizer: Any, template: TemplateSpec, stop: Sequence[str] = ()) -> Renderer:
    """The renderer of one episode, by the rule of `models.text.encode_prompt`: the tokenizer's chat
    template if it has one and `chat_template` is not "off"."""
    chat = uses_template(tokenizer, template)
    renderer = ChatRenderer if chat else PlainRenderer
    return renderer(tokenizer, template, tuple(stop))


def check_template(
    spec: EnvironmentSpec, tokenizer: Any, template: TemplateSpec, *, tools: bool = False
) -> None:
    """Raise UserError for an environment whose messages need a chat template, without one, and for
    a template that cannot carry them. `tools`: the environment opens with some."""
    chat = uses_template(tokenizer, template)
    if chat and probed(tokenizer, template).family is None and tools:
        raise UserError(UNKNOWN)
    if spec.name == "endpoint" and not chat:
        raise UserError(
            "environment.name=endpoint needs a tokenizer with a chat template, and the tokenizer "
            "of model.path has none: choose a chat model."
        )


def conversation_form(tokenizer: Any, template: TemplateSpec) -> str:
    """How conversations with an environment are written, for a dry run: the form of tool calls and
    of thoughts."""
    if not uses_template(tokenizer, template):
        return "plain text, without tools"
    found = probed(tokenizer, template)
    form = found.family.name if found.family else "of an unknown form: tools are refused"
    thoughts = f"thoughts kept apart ({found.thoughts[0]})" if found.thoughts else "no thoughts"
    return f"model.chat_template={template.chat_template}: tool calls {form}; {thoughts}"


def lost_roles(tokenizer: Any, template: TemplateSpec) -> list[str]:
    """A line on the roles that the chat template does not carry and that go by others; none if it
    carries all."""
    remarks = probed(tokenizer, template).remarks() if uses_template(tokenizer, template) else []
    return [f"not carried by the chat template: {', '.join(remarks)}"] if remarks else []


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
    """A tokenizer's own chat template, or the one in a file, whatever it is.

    After a turn the whole conversation is rendered as text. Where it begins with the text that the
    model has seen, followed by what it said, the rest is tokenised and appended: the tokens so far
    stay. Where the template has rewritten any of it (dropped an earlier `<think>`, say), a new part
    begins with the conversation as the template now gives it. A turn may be written by the template
    with other white space, or with its calls in the template's own form. It is not rewritten: it
    reads the same, and the sampled tokens stay in its place.
    """

    def __init__(self, tokenizer: Any, template: TemplateSpec, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._settings = template
        self._template = probed(tokenizer, template)
        self._spelled = Spelled(tokenizer, template.control_tokens)
        self._stop = stop
        self._messages: list[Message] = []
        self._tools: list[Any] = []  # as the environment gives them
        self._shown: list[Any] | None = None  # as the template is given them
        self._text = ""  # of the conversation up to the last answer, as the template renders it
        self._answer: Sequence[int] = ()  # the last turn of the model
        self._control = set(control_ids(tokenizer).values())
        self._dropped = self._control - self._marks()  # special tokens that are no part of a text

    def _marks(self) -> set[int]:
        """Special tokens that are part of a call or a thought."""
        control, family = control_ids(self._tokenizer), self._template.family
        if family is not None and family.special is None:
            ends = (self._tokenizer.eos_token_id, self._tokenizer.bos_token_id)
            return {i for i in self._control if i not in ends}
        marks = [*((family and family.special) or ()), *(self._template.thoughts or ())]
        return {control[mark] for mark in marks if mark in control}

    def open(self, opening: Opening) -> list[int]:
        messages = with_system(opening.messages, self._settings.system_prompt)
        self._tools = list(opening.tools)
        if self._tools and self._template.family is None:
            raise UserError(UNKNOWN)
        if self._tools and not self._template.tools:
            messages.insert(0, {"role": "system", "content": _described(self._tools)})
        self._shown = (
            self._spelled.hidden(self._tools, foreign=True) if self._template.tools else None
        )
        self._messages = self._prepared(messages)
        return self.reopen()

    def _prepared(self, messages: Sequence[Message], *, begins: bool = True) -> list[Message]:
        """Messages of others as the template takes them: control tokens hidden, in roles that it
        carries, calls in its form. `begins`: they open the conversation."""
        hidden = self._spelled.hidden_in(messages)
        return [self._with_calls(m) for m in self._template.mapped(hidden, begins=begins)]

    def _with_calls(self, message: Message) -> Message:
        calls = message.get("tool_calls")
        if not calls:
            return message
        template = self._template
        if template.calls and (len(calls) == 1 or template.several):
            return {**message, "tool_calls": [self._in_form(call) for call in calls]}
        if template.family is None or template.family.write is None:
            raise ValueError("the chat template has no form for the tool calls of a message")
        functions = [call["function"] for call in calls]
        written = [template.family.write(f["name"], f["arguments"]) for f in functions]
        texts = [*([message["content"]] if message["content"] else []), *written]
        kept = {key: value for key, value in message.items() if key != "tool_calls"}
        return {**kept, "content": "\n".join(texts)}

    def _in_form(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if self._template.calls == "text":
            function = {**function, "arguments": json.dumps(function["arguments"])}
        return {**call, "function": function}

    def reopen(self) -> list[int]:
        self._text = self._rendered(self._messages)
        return self._spelled.encode(self._text)

    def _rendered(self, messages: Sequence[Message], *, opens: bool = True) -> str:
        shown = self._shown or None
        return rendered(self._tokenizer, messages, self._settings, tools=shown, opens=opens)

    def parse(self, ids: Sequence[int]) -> Action:
        self._answer = ids
        kept = [i for i in ids if i not in self._dropped]
        text = _cut(self._tokenizer.decode(kept), self._stop)
        said = self._read(text)
        return Action(said.content, said.calls, said.error, reasoning=said.reasoning, whole=text)

    def _read(self, text: str) -> Said:
        family, marks = self._template.family or HERMES, self._template.thoughts
        opened = marks is not None and self._text.rstrip().endswith(marks[0])
        return read_turn(family, text, tools=self._tools, marks=marks, opened=opened)

    def extend(self, ids: Sequence[int], messages: Sequence[Message]) -> list[int] | None:
        said, last = self._answer, int(self._answer[-1])
        # the special token that the last turn ended with; None: it was cut off
        closed = last if last in self._dropped else None
        if closed is not None:
            said = said[:-1]
        turn = self._own_turn(self._as_shown(said))
        self._messages += [turn]
        before = list(self._messages)
        self._messages += _answering(turn, self._prepared(messages, begins=False))
        now = self._rendered(self._messages)
        rest = self._behind(now, before, self._as_shown(said), closed)
        if rest is None:
            return None
        suffix = self._spelled.encode(rest)
        if not suffix or (closed is not None and suffix[0] != closed):
            return None
        self._text = now
        return [*ids, *(suffix if closed is None else suffix[1:])]

    def _as_shown(self, said: Sequence[int]) -> str:
        """The text of a turn as it was sampled; special tokens that its other tokens spell are
        hidden, as in messages."""
        control = self._control

        def decode(run: Sequence[int]) -> str:
            return str(self._tokenizer.decode(list(run), clean_up_tokenization_spaces=False))

        text = decode(said)
        if len(self._spelled.names_in(text)) == sum(i in control for i in said):
            return text
        runs = itertools.groupby(said, lambda i: i in control)
        texts = [(special, decode(list(run))) for special, run in runs]
        return "".join(text if special else self._spelled.hidden(text) for special, text in texts)

    def _own_turn(self, text: str) -> Message:
        """The last turn as a message: as it was sampled, or with its calls in `tool_calls` where
        the template would not take an answer of a tool otherwise."""
        if not self._tools or self._template.verbatim:
            return {"role": "assistant", "content": text}
        said = self._read(text)
        if not said.calls:
            return {"role": "assistant", "content": text}
        calls = [
            {
                "id": f"c{len(self._messages):04d}{at:04d}",
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for at, call in enumerate(said.calls)
        ]
        message = {"role": "assistant", "content": said.content, "tool_calls": calls}
        return self._with_calls(message)

    def _behind(
        self, now: str, until: Sequence[Message], said: str, closed: int | None
    ) -> str | None:
        """The text of a conversation behind the model's last turn, with which the messages `until`
        end; None if the template has rewritten what was before it, or the turn."""
        before = self._text
        if not now.startswith(before):
            return None
        rest = _after(now[len(before) :], said)
        if rest is not None or closed is None:
            return rest
        end = str(self._tokenizer.decode([closed]))
        shown = self._rendered(until, opens=False)
        at = shown.rfind(end)
        if at < len(before):  # GLM: it is the next message's first token
            at = len(shown)
        if not now.startswith(shown[:at]) or not _same(
            self._read(shown[len(before) : at]), self._read(said)
        ):
            return None
        return now[at:]


def _same(one: Said, other: Said) -> bool:
    """Return whether two turns read the same, whatever white space is at their ends."""
    texts = [(said.reasoning.strip(), said.content.strip()) for said in (one, other)]
    return texts[0] == texts[1] and (one.calls, one.error) == (other.calls, other.error)


def _answering(turn: Message, messages: Sequence[Message]) -> list[Message]:
    """Messages, with the ids of a turn's calls in the answers that have none."""
    ids = iter([call["id"] for call in turn.get("tool_calls", [])])
    return [
        {**m, "tool_call_id": next(ids, "")}
        if m["role"] == "tool" and "tool_call_id" not in m
        else m
        for m in messages
    ]


def _described(tools: Sequence[Any]) -> str:
    """For a template that has no place for tools."""
    listed = "\n".join(json.dumps(tool) for tool in tools)
    return f"You may call these functions:\n{listed}\nTo call one, write {HERMES.form}"


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
                f"model.chat_template={job.template.chat_template} rewrites earlier turns, so that "
                "a worked episode is not a single sequence: set model.path to a trained model, or "
                "model.chat_template=off."
            )
        sampled += [False] * (len(extended) - len(ids))
        ids = extended
    getattr(environment, "close", lambda: None)()
    return np.array(ids, np.int64), np.array(sampled, bool)
