"""Other APIs of the endpoint, each translated to chat completions and back.

`/v1/responses` has OpenAI's form (platform.openai.com/docs/api-reference/responses),
`/v1/messages` Anthropic's (docs.anthropic.com/en/api/messages), `/v1/completions` OpenAI's older
one. A translation makes the chat request that means the same, so that `endpoint_http.read_request`
checks all of them in one way; what has no counterpart is refused. An answer that a client sends
back is translated to the message that it was, which is how a conversation is continued.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from rlcore.agents.endpoint_http import MODEL, Refused, chunks

Body = Mapping[str, Any]
Event = tuple[str, dict[str, Any]]  # the event's name, "" for none, and its data


class Form(ABC):
    """One API: how its requests are read, and its answers written."""

    done: str = ""  # the last line of a stream

    @abstractmethod
    def chat(self, asked: Body) -> dict[str, Any]:
        """The request as one for a chat completion. Raises Refused."""

    @abstractmethod
    def answer(self, completion: Body, asked: Body) -> dict[str, Any]:
        """A chat completion as the answer to `asked`."""

    @abstractmethod
    def events(self, completion: Body, asked: Body) -> list[Event]:
        """The same as a stream: all of it at once, in the events of the API."""

    def error(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body of a refusal, given in OpenAI's form."""
        return body


def _only(asked: Body, taken: Sequence[str], unread: Sequence[str] = ()) -> dict[str, Any]:
    """The fields that a translation takes, without nulls. Raises Refused for any other."""
    for field, value in asked.items():
        if value is not None and field not in taken and field not in unread:
            raise Refused(f"{field} is not supported: leave it out.")
    return {f: asked[f] for f in taken if asked.get(f) is not None}


def _check(asked: Body, field: str, neutral: Sequence[Any]) -> None:
    if asked.get(field) is not None and asked[field] not in neutral:
        choices = ", ".join(json.dumps(value) for value in neutral)
        raise Refused(
            f"{field}={json.dumps(asked[field])[:80]} is not supported: choose {choices}."
        )


def _objects(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        raise Refused(f"{where} is not a list of objects.")
    return value


def _blocks(content: Any, kinds: Sequence[str], where: str) -> str:
    """The text of a content: a string, or blocks of these kinds."""
    if isinstance(content, str):
        return content
    texts = []
    for block in _objects(content, where):
        if block.get("type") not in kinds or not isinstance(block.get("text"), str):
            raise Refused(
                f"{where} of type {block.get('type')} is not supported: rlcore trains on text "
                "alone."
            )
        texts.append(block["text"])
    return "".join(texts)


def _message(completion: Body) -> dict[str, Any]:
    message: dict[str, Any] = completion["choices"][0]["message"]
    return message


def _calls(message: Body) -> Iterator[tuple[str, str, str]]:
    """(id, name, arguments as JSON) of the calls of a message."""
    for call in message.get("tool_calls") or ():
        yield call["id"], call["function"]["name"], call["function"]["arguments"]


def _called(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    return {
        "id": str(call_id),
        "type": "function",
        "function": {"name": str(name), "arguments": arguments},
    }


class ChatForm(Form):
    """`/v1/chat/completions`, as it is."""

    done = "[DONE]"

    def chat(self, asked: Body) -> dict[str, Any]:
        return dict(asked)

    def answer(self, completion: Body, asked: Body) -> dict[str, Any]:
        return dict(completion)

    def events(self, completion: Body, asked: Body) -> list[Event]:
        options = asked.get("stream_options")
        usage = isinstance(options, dict) and bool(options.get("include_usage"))
        return [("", chunk) for chunk in chunks(completion, usage=usage)]


class CompletionForm(Form):
    """`/v1/completions`: the prompt is asked as a message of the user, by the chat template."""

    done = "[DONE]"
    neutral: ClassVar[dict[str, list[Any]]] = {
        "best_of": [1],
        "echo": [False],
        "suffix": [""],
        "logprobs": [False, 0],
    }

    def chat(self, asked: Body) -> dict[str, Any]:
        prompt = asked.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            raise Refused(
                "prompt is not one text: token ids and several prompts are not supported."
            )
        for field, values in self.neutral.items():
            _check(asked, field, values)
        kept = {f: v for f, v in asked.items() if f not in (*self.neutral, "prompt")}
        for field in ("messages", "tools", "tool_choice"):
            if kept.get(field) is not None:
                raise Refused(f"{field} is not a field of completions: use /v1/chat/completions.")
        return {**kept, "messages": [{"role": "user", "content": prompt}]}

    def answer(self, completion: Body, asked: Body) -> dict[str, Any]:
        (choice,) = completion["choices"]
        text = choice["message"]["content"] or ""
        said = {
            "index": 0,
            "text": text,
            "logprobs": None,
            "finish_reason": choice["finish_reason"],
        }
        return {**completion, "object": "text_completion", "choices": [said]}

    def events(self, completion: Body, asked: Body) -> list[Event]:
        whole = self.answer(completion, asked)
        usage = whole.pop("usage")
        events: list[Event] = [("", whole)]
        if (asked.get("stream_options") or {}).get("include_usage"):
            events.append(("", {**whole, "choices": [], "usage": usage}))
        return events


class MessagesForm(Form):
    """`/v1/messages`: blocks of text, `tool_use` and `tool_result`."""

    taken = ("model", "messages", "system", "max_tokens", "stop_sequences", "stream", "temperature")
    further = ("top_p", "top_k", "tools", "tool_choice", "thinking", "metadata", "service_tier")
    reasons: ClassVar[dict[str, str]] = {
        "stop": "end_turn",
        "length": "max_tokens",
        "tool_calls": "tool_use",
    }

    def chat(self, asked: Body) -> dict[str, Any]:
        given = _only(asked, (*self.taken, *self.further))
        _check(given, "thinking", [{"type": "disabled"}])
        messages: list[dict[str, Any]] = []
        if given.get("system"):
            text = _blocks(given["system"], ["text"], "system")
            messages.append({"role": "system", "content": text})
        for message in _objects(given.get("messages", []), "messages"):
            messages += self._translated(message)
        kept = ("max_tokens", "stream", "temperature", "top_p")
        chat: dict[str, Any] = {f: given[f] for f in kept if f in given}
        if "top_k" in given:
            chat["top_k"] = given["top_k"]
        if given.get("stop_sequences"):
            chat["stop"] = given["stop_sequences"]
        if given.get("tools"):
            chat["tools"] = [self._tool(tool) for tool in _objects(given["tools"], "tools")]
        return {**chat, **self._choice(given.get("tool_choice")), "messages": messages}

    def _choice(self, choice: Any) -> dict[str, Any]:
        if choice is None:
            return {}
        if not isinstance(choice, dict):
            raise Refused("tool_choice is not an object.")
        kinds = {"auto": "auto", "none": "none", "any": "required"}
        kind = kinds.get(str(choice.get("type")), choice)
        several = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
        return {"tool_choice": kind, **several}

    def _tool(self, tool: Body) -> dict[str, Any]:
        if tool.get("type", "custom") != "custom" or "input_schema" not in tool:
            raise Refused(f"A tool of type {tool.get('type')} is not supported: give input_schema.")
        function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        return {"type": "function", "function": function}

    def _translated(self, message: Body) -> list[dict[str, Any]]:
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            raise Refused(f"role={role!r} is not one of user, assistant.")
        if isinstance(content, str):
            return [{"role": role, "content": content}]
        texts, calls, results, thoughts = [], [], [], []
        for block in _objects(content, "content"):
            kind = block.get("type")
            if kind == "tool_use" and role == "assistant":
                calls.append(_called(block.get("id"), block.get("name"), block.get("input", {})))
            elif kind == "tool_result" and role == "user":
                results.append(self._result(block))
            elif kind == "thinking" and role == "assistant":
                thoughts.append(str(block.get("thinking", "")))
            else:
                texts.append(_blocks([block], ["text"], "content"))
        text = "".join(texts)
        if role == "user":
            return [*results, *([{"role": role, "content": text}] if text or not results else [])]
        said: dict[str, Any] = {"role": role, "content": text}
        if calls:
            said["tool_calls"] = calls
        if thoughts:
            said["reasoning_content"] = "".join(thoughts)
        return [said]

    def _result(self, block: Body) -> dict[str, Any]:
        text = _blocks(block.get("content") or "", ["text"], "tool_result")
        if block.get("is_error") and not text.lower().startswith("error"):
            text = f"Error: {text}"
        return {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": text}

    def answer(self, completion: Body, asked: Body) -> dict[str, Any]:
        message, (choice,) = _message(completion), completion["choices"]
        content: list[dict[str, Any]] = []
        if message.get("reasoning_content"):
            thought = message["reasoning_content"]
            content.append({"type": "thinking", "thinking": thought, "signature": ""})
        calls = list(_calls(message))
        if message["content"] or not calls:
            content.append({"type": "text", "text": message["content"] or ""})
        for call, name, arguments in calls:
            given = json.loads(arguments)
            content.append({"type": "tool_use", "id": call, "name": name, "input": given})
        usage = completion["usage"]
        return {
            "id": completion["id"].replace("chatcmpl", "msg"),
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": content,
            "stop_reason": self.reasons.get(choice["finish_reason"], "end_turn"),
            "stop_sequence": None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "output_tokens": usage["completion_tokens"],
            },
        }

    def events(self, completion: Body, asked: Body) -> list[Event]:
        whole = self.answer(completion, asked)
        usage = whole["usage"]
        begun = {**whole, "content": [], "stop_reason": None}
        begun["usage"] = {**usage, "output_tokens": 0}
        data: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
        for index, block in enumerate(whole["content"]):
            empty, deltas = self._deltas(block)
            at = {"index": index}
            data.append({"type": "content_block_start", **at, "content_block": empty})
            data += [{"type": "content_block_delta", **at, "delta": delta} for delta in deltas]
            data.append({"type": "content_block_stop", **at})
        ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        data.append({"type": "message_delta", "delta": ended, "usage": usage})
        data.append({"type": "message_stop"})
        return [(event["type"], event) for event in data]

    def _deltas(self, block: Body) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """(a block as it begins, what is added to it)."""
        if block["type"] == "tool_use":
            given = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            return {**block, "input": {}}, [given]
        name = "thinking" if block["type"] == "thinking" else "text"
        return {**block, name: ""}, [{"type": f"{name}_delta", name: block[name]}]

    def error(self, body: dict[str, Any]) -> dict[str, Any]:
        error = body["error"]
        return {"type": "error", "error": {"type": error["type"], "message": error["message"]}}


class ResponsesForm(Form):
    """`/v1/responses`: items of the types message, function_call, function_call_output and
    reasoning. No response is stored: a request sends the whole conversation."""

    taken = ("input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text")
    numbers = ("max_output_tokens", "temperature", "top_p", "top_logprobs", "stream", "truncation")
    unread = ("model", "store", "metadata", "user", "include", "service_tier", "stream_options")
    keys = ("safety_identifier", "prompt_cache_key", "background", "reasoning")

    def chat(self, asked: Body) -> dict[str, Any]:
        if asked.get("previous_response_id") is not None or asked.get("conversation") is not None:
            raise Refused("No response is stored here: send the whole conversation as input.")
        given = _only(asked, (*self.taken, *self.numbers, *self.keys), self.unread)
        _check(given, "truncation", ["disabled"])
        _check(given, "background", [False])
        _check(given, "reasoning", [{}, {"effort": None}, {"effort": None, "summary": None}])
        form = given.get("text", {})
        if not isinstance(form, dict) or set(form) - {"format"}:
            raise Refused(f"text={json.dumps(form)[:80]} is not supported: give format alone.")
        chat: dict[str, Any] = {"response_format": form.get("format")}
        chat |= {f: given.get(f) for f in ("temperature", "top_p", "top_logprobs", "stream")}
        chat |= {"max_tokens": given.get("max_output_tokens")}
        chat |= {"parallel_tool_calls": given.get("parallel_tool_calls")}
        chat |= {"tool_choice": given.get("tool_choice")}
        if given.get("tools"):
            chat["tools"] = [self._tool(tool) for tool in _objects(given["tools"], "tools")]
        messages = self._messages(given.get("input"))
        if given.get("instructions"):
            messages.insert(0, {"role": "system", "content": given["instructions"]})
        return {**chat, "messages": messages}

    def _tool(self, tool: Body) -> dict[str, Any]:
        if tool.get("type") != "function":
            raise Refused(f"A tool of type {tool.get('type')} is not supported: choose function.")
        return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}

    def _messages(self, given: Any) -> list[dict[str, Any]]:
        if isinstance(given, str):
            return [{"role": "user", "content": given}]
        messages: list[dict[str, Any]] = []
        thought = ""  # of the assistant's message that follows
        for item in _objects(given, "input"):
            kind = item.get("type", "message")
            if kind == "reasoning":
                thought = "".join(str(b.get("text", "")) for b in item.get("content") or ())
                continue
            if kind == "message":
                text = _blocks(item.get("content"), ["input_text", "output_text"], "content")
                messages.append({"role": item.get("role"), "content": text})
            elif kind == "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                call = _called(item.get("call_id"), item.get("name"), item.get("arguments"))
                messages[-1].setdefault("tool_calls", []).append(call)
            elif kind == "function_call_output":
                text = _blocks(item.get("output"), ["input_text", "output_text"], "output")
                told = {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": text}
                messages.append(told)
            else:
                raise Refused(f"An item of type {kind} is not supported.")
            if thought and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning_content"], thought = thought, ""
        return messages

    def answer(self, completion: Body, asked: Body) -> dict[str, Any]:
        (choice,) = completion["choices"]
        cut = choice["finish_reason"] == "length"
        usage = completion["usage"]
        return {
            "id": completion["id"].replace("chatcmpl", "resp"),
            "object": "response",
            "created_at": 0,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "instructions": asked.get("instructions"),
            "metadata": asked.get("metadata") or {},
            "model": MODEL,
            "output": self._output(completion, "incomplete" if cut else "completed"),
            "parallel_tool_calls": True,
            "temperature": asked.get("temperature"),
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": asked.get("tools") or [],
            "top_p": asked.get("top_p"),
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def _output(self, completion: Body, status: str) -> list[dict[str, Any]]:
        message, number = _message(completion), completion["id"].rpartition("-")[2]
        items: list[dict[str, Any]] = []
        if message.get("reasoning_content"):
            thought = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
            rs = {"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": thought}
            items.append(rs)
        calls = list(_calls(message))
        if message["content"] or not calls:
            text: dict[str, Any] = {"type": "output_text", "text": message["content"] or ""}
            text["annotations"] = []
            said = {"id": f"msg_{number}", "type": "message", "role": "assistant"}
            items.append({**said, "status": status, "content": [text]})
        for call, name, arguments in calls:
            made = {"id": f"fc_{call}", "type": "function_call", "call_id": call, "name": name}
            items.append({**made, "arguments": arguments, "status": "completed"})
        return items

    def events(self, completion: Body, asked: Body) -> list[Event]:
        whole = self.answer(completion, asked)
        begun = {**whole, "status": "in_progress", "output": [], "usage": None}
        data: list[dict[str, Any]] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for index, item in enumerate(whole["output"]):
            data += self._of_item(index, item)
        data.append({"type": f"response.{whole['status']}", "response": whole})
        return [(e["type"], {**e, "sequence_number": i}) for i, e in enumerate(data)]

    def _of_item(self, index: int, item: dict[str, Any]) -> list[dict[str, Any]]:
        at = {"output_index": index}
        inner: list[dict[str, Any]] = []
        empty = {**item, "status": "in_progress"}
        key = {**at, "item_id": item["id"]}
        if item["type"] == "function_call":
            empty["arguments"] = ""
            name, given = "response.function_call_arguments", item["arguments"]
            inner.append({"type": f"{name}.delta", **key, "delta": given})
            inner.append({"type": f"{name}.done", **key, "arguments": given, "name": item["name"]})
        elif item["type"] == "message":
            (part,) = item["content"]
            empty["content"] = []
            of = {**key, "content_index": 0}
            none = {**part, "text": ""}
            text = {"text": part["text"], "logprobs": []}
            inner.append({"type": "response.content_part.added", **of, "part": none})
            delta = {"delta": part["text"], "logprobs": []}
            inner.append({"type": "response.output_text.delta", **of, **delta})
            inner.append({"type": "response.output_text.done", **of, **text})
            inner.append({"type": "response.content_part.done", **of, "part": part})
        return [
            {"type": "response.output_item.added", **at, "item": empty},
            *inner,
            {"type": "response.output_item.done", **at, "item": item},
        ]


FORMS: dict[str, Form] = {
    "/v1/chat/completions": ChatForm(),
    "/v1/completions": CompletionForm(),
    "/v1/messages": MessagesForm(),
    "/v1/responses": ResponsesForm(),
}
