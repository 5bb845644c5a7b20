"""The endpoint of one session: the APIs of `endpoint_forms.py` over HTTP, behind a token.

It lives in the process of its episode and ends with it, so reads and answers need no deadline: the
environment's deadlines end the process.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlcore.agents.endpoint_forms import FORMS, ChatForm, Form
from rlcore.agents.endpoint_http import MODEL, Refused

MAX_BODY = 16 << 20  # bytes
STREAMED = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Answered:
    """A chat completion on its way to the client."""

    completion: dict[str, Any]
    delivered: Callable[[bool], None]  # told whether it was written to a client that still waits


# Given a chat request and whether its client still waits. Called from many threads at once; raises
# Refused.
Complete = Callable[[dict[str, Any], Callable[[], bool]], Answered]


@dataclass(frozen=True, slots=True)
class Address:
    """The addresses of an endpoint: where it listens, and the one that programs are told.

    Example: Address("0.0.0.0", "10.0.0.7")
    """

    bind: str = "127.0.0.1"
    advertised: str = "127.0.0.1"


LOOPBACK = Address()


class SessionServer(ThreadingHTTPServer):
    """Serves from its construction until `close`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, complete: Complete, max_len: int, address: Address = LOOPBACK) -> None:
        super().__init__((address.bind, 0), _EndpointHandler)
        self.complete = complete
        self.max_len = max_len
        self.api_key = f"rlcore-{secrets.token_urlsafe(24)}"
        self.host = address.advertised
        self.base_url = f"http://{self.host}:{self.server_port}/v1"
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
        form = FORMS.get(self._path, ChatForm())
        try:
            serve()
        except Refused as refused:
            with contextlib.suppress(OSError):
                self._send(form.error(refused.body()), refused.status)
        except OSError:  # the client has left
            self.close_connection = True
        except Exception as error:  # of any kind: a request is answered, whatever it holds
            unread = Refused(f"The request cannot be read: {type(error).__name__}: {error}.")
            with contextlib.suppress(OSError):
                self._send(form.error(unread.body()), unread.status)

    @property
    def _path(self) -> str:
        """Without a query, which some clients add."""
        return self.path.partition("?")[0]

    def _models(self) -> None:
        self._authorise()
        if self._path != "/v1/models":
            raise self._unknown()
        model: dict[str, Any] = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rlcore"}
        model["max_model_len"] = self.server.max_len  # as vLLM's server names it
        self._send({"object": "list", "data": [model]})

    def _completion(self) -> None:
        # what is left of a body that was not read must not be taken for the next request
        self.close_connection = True
        self._authorise()
        form = FORMS.get(self._path)
        if form is None:
            raise self._unknown()
        asked = self._asked()
        self.close_connection = False
        answer = self.server.complete(form.chat(asked), self._waits)
        read = False
        try:
            if self._waits():
                self._write(form, asked, answer.completion)
                read = True
        finally:
            answer.delivered(read)

    def _write(self, form: Form, asked: dict[str, Any], completion: dict[str, Any]) -> None:
        if not asked.get("stream"):
            self._send(form.answer(completion, asked))
            return
        lines = []
        for name, data in form.events(completion, asked):
            lines.append(f"event: {name}\n" if name else "")
            lines.append(f"data: {json.dumps(data)}\n\n")
        if form.done:
            lines.append(f"data: {form.done}\n\n")
        self._reply("".join(lines).encode(), STREAMED, 200)

    def _authorise(self) -> None:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        given = self.headers.get("x-api-key", given)  # as clients of Anthropic's API send it
        if not hmac.compare_digest(given.encode(), self.server.api_key.encode()):
            raise Refused("The API key is not this session's.", 401, "invalid_api_key")

    def _unknown(self) -> Refused:
        served = f"POST {', '.join(FORMS)} and GET /v1/models"
        return Refused(f"{self.command} {self.path} is not served, only {served}.", 404)

    def _asked(self) -> dict[str, Any]:
        try:
            asked = json.loads(self._body())
        except (ValueError, RecursionError) as error:
            raise Refused(f"The body is not JSON: {error}.") from error
        if not isinstance(asked, dict):
            raise Refused("The body is not a JSON object.")
        return asked

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
