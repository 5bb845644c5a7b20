"""OpenAI's chat completions: requests as they are read, answers as they are written.

The form is the one of POST /v1/chat/completions (platform.openai.com/docs/api-reference/chat). What
would sample from another distribution than the run's is refused, so that the log-probs of the
record stay those that were sampled from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.environments.protocol import Action, Message

MODEL = "policy"  # the only model of the endpoint; a request may name any
# Fields that change nothing of what is sampled.
UNREAD = {"model", "user", "metadata", "store", "safety_identifier", "prompt_cache_key"}
READ = {"messages", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options"}
# Fields of which only these values mean what the endpoint does; null is accepted for all.
ONLY: dict[str, list[Any]] = {
    "n": [1],
    "tool_choice": ["auto", "none"],
    "parallel_tool_calls": [True],
    "logprobs": [False],
    "top_logprobs": [0],
    "response_format": [{"type": "text"}],
    "functions": [[]],
    "modalities": [["text"]],
    "service_tier": ["auto", "default", "standard_only"],
    "ignore_eos": [False],
    "min_tokens": [0],
    "skip_special_tokens": [True],
    "use_beam_search": [False],
}
# Of these, what a request says may be overridden, too: `sampling="override"`.
SAMPLED: dict[str, list[Any]] = {
    "frequency_penalty": [0],
    "presence_penalty": [0],
    "repetition_penalty": [1],
    "length_penalty": [1],
    "logit_bias": [{}],
    "top_k": [-1, 0],
    "min_p": [0],
    "seed": [],
}
CONSTRAINED = {"tool_choice", "response_format"}  # what would constrain the tokens
ROLES = ("system", "developer", "user", "assistant", "tool")


# Fields of messages that would change what the model reads, and that templates have no place for.
NO_PLACE = {
    "name": "write it into the content",
    "function_call": "use tool_calls and messages of role tool",
    "audio": "rlcore trains on text alone",
    "refusal": "write it into the content",
}


class Refused(Exception):
    """A request that is answered by an error, in OpenAI's form."""

    def __init__(self, sentence: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(sentence)
        self.status = status
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the body of the response."""
        error = {"message": str(self), "type": "invalid_request_error", "param": None}
        return {"error": {**error, "code": self.code}}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the run samples, which a request may repeat but not change.

    Example: Sampling(False, 1.0, 1.0, [], 4096)
    """

    evaluates: bool  # by settings of its own, that a program cannot know
    temperature: float
    top_p: float
    stop: Sequence[str]
    max_len: int  # tokens of a conversation
    overrides: bool = False  # the run's sampling holds whatever a request says


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for one turn; its messages are as `cleaned` leaves them."""

    messages: list[Message]
    tools: list[Any]
    max_tokens: int | None
    overridden: bool  # it asked for other sampling than the run's


def read_request(asked: Mapping[str, Any], sampling: Sampling) -> ChatRequest:
    """A request for a chat completion. Raises Refused."""
    asked = {field: value for field, value in asked.items() if value is not None}
    _check_fields(asked)
    other = _other_sampling(asked, sampling)
    if other and not sampling.overrides:
        raise Refused(other)
    messages = _list(asked, "messages")
    if not messages:
        raise Refused("messages is empty.")
    tools = _list(asked, "tools") if asked.get("tool_choice") != "none" else []
    names: dict[str, str] = {}  # of the functions that were called, by id of the call
    return ChatRequest(
        [cleaned(message, names) for message in messages],
        tools,
        _max_tokens(asked),
        bool(other),
    )


def _check_fields(asked: Mapping[str, Any]) -> None:
    for field, value in asked.items():
        if field in ONLY and value not in ONLY[field]:
            choices = ", ".join(json.dumps(v) for v in ONLY[field])
            shown = json.dumps(value)
            why = " (it would constrain the tokens)" if field in CONSTRAINED else ""
            raise Refused(f"{field}={shown:.80} is not supported{why}: choose {choices}.")
        if field not in {*ONLY, *SAMPLED, *UNREAD, *READ, "temperature", "top_p", "stop"}:
            raise Refused(f"{field} is not supported: leave it out.")


OVERRIDE = "environment.args.sampling=override samples as the run does, whatever a request says"


def _other_sampling(asked: Mapping[str, Any], sampling: Sampling) -> str:
    """Return a sentence on the first field that asks for other sampling than the run's; "": there
    is none."""
    for field, neutral in SAMPLED.items():
        if field in asked and asked[field] not in neutral:
            shown = json.dumps(asked[field])
            return f"{field}={shown:.80} is not what the run samples by: leave it out; {OVERRIDE}."
    if sampling.evaluates:
        return ""
    for field, own in (("temperature", sampling.temperature), ("top_p", sampling.top_p)):
        if field in asked and asked[field] != own:
            return (
                f"{field}={asked[field]} is not what the run samples at: leave it out, or set "
                f"rollout.{field}, which is {own:g}; {OVERRIDE}."
            )
    stop = asked.get("stop", [])
    for string in stop if isinstance(stop, list) else [stop]:
        if string not in sampling.stop:
            return (
                f"stop={json.dumps(string)} is not one of the run's rollout.stop="
                f"{json.dumps(list(sampling.stop))}: leave it out, or add it there; {OVERRIDE}."
            )
    return ""


def _max_tokens(asked: Mapping[str, Any]) -> int | None:
    given = [asked[f] for f in ("max_tokens", "max_completion_tokens") if f in asked]
    for count in given:
        if not isinstance(count, int) or count < 1:
            raise Refused(f"max_tokens={count} is not a number of tokens from 1.")
    return min(given, default=None)


def _list(asked: Mapping[str, Any], field: str) -> list[Any]:
    value = asked.get(field, [])
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        raise Refused(f"{field} is not a list of objects.")
    return value


def cleaned(message: Mapping[str, Any], names: dict[str, str]) -> Message:
    """A message as a chat template reads it: text, tool calls in OpenAI's form with their arguments
    as an object, and the id of the call that a tool answers.

    Clients send an answer back with fields that it had not, so nothing else is kept. `names`
    collects the names of called functions, and gives an answer of a tool its name. Raises Refused,
    also for what would change the conversation and has no place in it.
    """
    role = message.get("role")
    if role not in ROLES:
        raise Refused(f"role={role!r} is not one of {', '.join(ROLES)}.")
    for field, advice in NO_PLACE.items():
        if message.get(field) and (field, role) != ("name", "tool"):
            raise Refused(f"{field} of a message of role {role} is not supported: {advice}.")
    text = _text(message.get("content"))
    if role == "tool":
        number = str(message.get("tool_call_id") or "")
        name = names.get(number, message.get("name"))
        told = {"name": name, "tool_call_id": number}
        return {
            "role": role,
            "content": text,
            **{key: value for key, value in told.items() if value},
        }
    calls = _list(message, "tool_calls") if message.get("tool_calls") else []
    written = [_call(call, names) for call in calls]
    thought = message.get("reasoning_content") if role == "assistant" else None
    kept = {"reasoning_content": str(thought)} if thought else {}
    return {"role": role, "content": text, **({"tool_calls": written} if written else {}), **kept}


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refused("content is neither text nor a list of blocks.")
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text" or not isinstance(block.get("text"), str):
            raise Refused(f"content of type {kind} is not supported: rlcore trains on text alone.")
    return "".join(block["text"] for block in content)


def _call(call: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
    try:
        function = call["function"]
        name, arguments = str(function["name"]), function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"A tool call cannot be read: {type(error).__name__}: {error}.") from error
    if not isinstance(arguments, dict):
        raise Refused(f"The arguments of the tool call {name} are not an object.")
    number = str(call.get("id") or "")
    names[number] = name
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": number, **made} if number else made


def answered(action: Action, number: int) -> dict[str, Any]:
    """A turn of the model as a completion, the session's `number`-th.

    Ids of calls have nine letters and digits, which Mistral's templates require. There is no clock
    in it, so that equal episodes read equal answers.
    """
    calls = [
        {
            "id": f"c{number:04d}{i:04d}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for i, call in enumerate(action.tool_calls)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": action.text, "refusal": None}
    if action.reasoning:
        message["reasoning_content"] = action.reasoning
    if calls:
        message |= {"content": action.text or None, "tool_calls": calls}
    prompt, sampled = action.tokens
    reason = "tool_calls" if calls else action.finish_reason
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        },
    }


def chunks(completion: Mapping[str, Any], *, usage: bool) -> list[dict[str, Any]]:
    """A completion as the events of a stream: all of it at once, then why it ended."""
    (choice,) = completion["choices"]
    message = choice["message"]
    told = ("role", "content", "refusal", "reasoning_content")
    delta = {name: message[name] for name in told if name in message}
    if "tool_calls" in message:
        delta["tool_calls"] = [{"index": i, **c} for i, c in enumerate(message["tool_calls"])]
    head = {name: completion[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    said = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    over = {**said, "delta": {}, "finish_reason": choice["finish_reason"]}
    events = [{**head, "choices": [said]}, {**head, "choices": [over]}]
    if usage:
        events.append({**head, "choices": [], "usage": completion["usage"]})
    return events
