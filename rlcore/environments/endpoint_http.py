"""OpenAI's chat completions: requests as they are read, answers as they are written.

The form is that of POST /v1/chat/completions (platform.openai.com/docs/api-reference/chat). What
would sample from another distribution than the run's is refused, so that the log-probs of the
record stay those that were sampled from.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlcore.environments.protocol import Action, Message
from rlcore.environments.renderers import written_call

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
    "frequency_penalty": [0],
    "presence_penalty": [0],
    "response_format": [{"type": "text"}],
}
ROLES = ("system", "developer", "user", "assistant", "tool")


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

    Example: Sampling(False, 1.0, 1.0, [])
    """

    evaluates: bool  # by settings of its own, that a program cannot know
    temperature: float
    top_p: float
    stop: Sequence[str]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for one turn; its messages are as `cleaned` leaves them."""

    messages: list[Message]
    tools: list[Any]
    max_tokens: int | None
    stream: bool
    usage: bool  # whether a stream ends with the usage


def read_request(body: bytes, sampling: Sampling) -> ChatRequest:
    """Raises Refused."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"The body is not JSON: {error}.") from error
    if not isinstance(asked, dict):
        raise Refused("The body is not a JSON object.")
    asked = {field: value for field, value in asked.items() if value is not None}
    _check_fields(asked)
    _check_sampling(asked, sampling)
    messages = _list(asked, "messages")
    if not messages:
        raise Refused("messages is empty.")
    tools = _list(asked, "tools") if asked.get("tool_choice") != "none" else []
    options = asked.get("stream_options", {})
    names: dict[str, str] = {}  # of the functions that were called, by id of the call
    return ChatRequest(
        [cleaned(message, names) for message in messages],
        tools,
        _max_tokens(asked),
        bool(asked.get("stream", False)),
        isinstance(options, dict) and bool(options.get("include_usage")),
    )


def _check_fields(asked: Mapping[str, Any]) -> None:
    for field, value in asked.items():
        if field in ONLY and value not in ONLY[field]:
            choices = ", ".join(json.dumps(v) for v in ONLY[field])
            shown = json.dumps(value)
            raise Refused(f"{field}={shown:.80} is not supported: choose {choices}.")
        if field not in {*ONLY, *UNREAD, *READ, "temperature", "top_p", "stop"}:
            raise Refused(f"{field} is not supported: leave it out.")


def _check_sampling(asked: Mapping[str, Any], sampling: Sampling) -> None:
    if sampling.evaluates:
        return
    for field, own in (("temperature", sampling.temperature), ("top_p", sampling.top_p)):
        if field in asked and asked[field] != own:
            raise Refused(
                f"{field}={asked[field]} is not what the run samples at: leave it out, or set "
                f"rollout.{field}, which is {own:g}."
            )
    stop = asked.get("stop", [])
    for string in stop if isinstance(stop, list) else [stop]:
        if string not in sampling.stop:
            raise Refused(
                f"stop={json.dumps(string)} is not one of the run's rollout.stop="
                f"{json.dumps(list(sampling.stop))}: leave it out, or add it there."
            )


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
    """A message as a chat template reads it: text alone, with tool calls as the model writes them.

    Clients send an answer back with fields that it had not, so nothing else is kept. `names`
    collects the names of called functions, and gives an answer of a tool its name. Raises Refused.
    """
    role = message.get("role")
    if role not in ROLES:
        raise Refused(f"role={role!r} is not one of {', '.join(ROLES)}.")
    text = _text(message.get("content"))
    if role == "tool":
        name = names.get(str(message.get("tool_call_id")), message.get("name"))
        return {"role": role, "content": text, **({"name": name} if name else {})}
    calls = _list(message, "tool_calls") if message.get("tool_calls") else []
    written = [_call(call, names) for call in calls]
    return {"role": role, "content": "\n".join([*([text] if text else []), *written])}


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


def _call(call: Mapping[str, Any], names: dict[str, str]) -> str:
    try:
        function = call["function"]
        name, arguments = str(function["name"]), function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"A tool call cannot be read: {type(error).__name__}: {error}.") from error
    names[str(call.get("id"))] = name
    return written_call(name, arguments)


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
    delta = {name: message[name] for name in ("role", "content", "refusal")}
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


MAX_BODY = 16 << 20  # bytes
STREAMED = "text/event-stream"
# Given a body and whether its client still waits: (the completion, whether to stream it and its
# usage). Called from many threads at once; raises Refused.
Complete = Callable[[bytes, Callable[[], bool]], tuple[dict[str, Any], bool, bool]]


# The endpoint of one session: chat completions over HTTP on loopback, behind a bearer token.
#
# It lives in the process of its episode and ends with it, so reads and answers have no deadline of
# their own: the environment's deadlines end the process.


class SessionServer(ThreadingHTTPServer):
    """Serves from its construction until `close`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, complete: Complete) -> None:
        super().__init__(("127.0.0.1", 0), _EndpointHandler)
        self.complete = complete
        self.api_key = f"rlcore-{secrets.token_urlsafe(24)}"
        self.base_url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, name="endpoint", daemon=True).start()

    def close(self) -> None:
        """Accept no further connections."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
        self.shutdown()
        self.server_close()


class _EndpointHandler(BaseHTTPRequestHandler):
    server: SessionServer
    protocol_version = "HTTP/1.1"  # clients keep their connection

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what the environment's process prints is read by nobody."""

    def do_GET(self) -> None:
        self._guarded(self._models)

    def do_POST(self) -> None:
        self._guarded(self._completion)

    def _guarded(self, serve: Callable[[], None]) -> None:
        try:
            serve()
        except Refused as refused:
            with contextlib.suppress(OSError):
                self._send(refused.body(), refused.status)
        except OSError:  # the client has left
            self.close_connection = True
        except Exception as error:  # of any kind: a request is answered, whatever it holds
            unread = Refused(f"The request cannot be read: {type(error).__name__}: {error}.")
            with contextlib.suppress(OSError):
                self._send(unread.body(), unread.status)

    def _models(self) -> None:
        self._authorise()
        if self.path != "/v1/models":
            raise self._unknown()
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rlcore"}
        self._send({"object": "list", "data": [model]})

    def _completion(self) -> None:
        # what is left of a body that was not read must not be taken for the next request
        self.close_connection = True
        self._authorise()
        if self.path != "/v1/chat/completions":
            raise self._unknown()
        body = self._body()
        self.close_connection = False
        completion, stream, usage = self.server.complete(body, self._waits)
        if stream:
            lines = [*map(json.dumps, chunks(completion, usage=usage)), "[DONE]"]
            self._reply("".join(f"data: {line}\n\n" for line in lines).encode(), STREAMED, 200)
        else:
            self._send(completion)

    def _authorise(self) -> None:
        given = self.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {self.server.api_key}".encode()):
            raise Refused("The API key is not this session's.", 401, "invalid_api_key")

    def _unknown(self) -> Refused:
        served = "POST /v1/chat/completions and GET /v1/models"
        return Refused(f"{self.command} {self.path} is not served, only {served}.", 404)

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise Refused("The request has no Content-Length.", 411)
        if int(length) > MAX_BODY:
            raise Refused(f"The body is larger than {MAX_BODY >> 20} MiB.", 413)
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionError("the client has left")
        return body

    def _waits(self) -> bool:
        """Return whether the client still keeps its connection open."""
        poll = select.poll()  # `select` takes no descriptor above 1023
        try:
            poll.register(self.connection, select.POLLIN)
            return not poll.poll(0) or bool(self.connection.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):  # ValueError: it is closed
            return False

    def _send(self, answer: dict[str, Any], status: int = 200) -> None:
        self._reply(json.dumps(answer).encode(), "application/json", status)

    def _reply(self, data: bytes, kind: str, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)
