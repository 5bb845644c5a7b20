"""The endpoint of one session: chat completions over HTTP on loopback, behind a bearer token.

It lives in the process of its episode and ends with it, so reads and answers have no deadline of
their own: the environment's deadlines end the process.
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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlcore.environments.endpoint.messages import MODEL, Refused, chunks

MAX_BODY = 16 << 20  # bytes
STREAMED = "text/event-stream"

# Given a body and whether its client still waits: (the completion, whether to stream it and its
# usage). Called from many threads at once; raises Refused.
Complete = Callable[[bytes, Callable[[], bool]], tuple[dict[str, Any], bool, bool]]


class SessionServer(ThreadingHTTPServer):
    """Serves from its construction until `close`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, complete: Complete) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
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


class _Handler(BaseHTTPRequestHandler):
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
            self._stream([*chunks(completion, usage=usage)])
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
        """Whether the client has not closed its connection."""
        readable = select.select([self.connection], [], [], 0)[0]
        try:
            return not readable or bool(self.connection.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _send(self, answer: dict[str, Any], status: int = 200) -> None:
        self._reply(json.dumps(answer).encode(), "application/json", status)

    def _stream(self, events: list[dict[str, Any]]) -> None:
        lines = [*(json.dumps(event) for event in events), "[DONE]"]
        self._reply("".join(f"data: {line}\n\n" for line in lines).encode(), STREAMED, 200)

    def _reply(self, data: bytes, kind: str, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)
