"""A reward service on loopback, for tests of graders by HTTP and judges."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

POLL_S = 0.02  # between two looks of a server at whether it is to end


@dataclass(slots=True)
class HttpReply:
    """How a request is answered. Example: HttpReply(503, {"detail": "busy"})"""

    status: int = 200
    body: Any = None  # JSON, or bytes as they are
    after_s: float = 0.0  # before the first byte
    cut: bool = False  # half of the body, and then the connection is closed
    drip_s: float = 0.0  # between two bytes of the body
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that came. Example: Seen("/reward", {"query": ["1+1=2"]}, "Bearer x")"""

    path: str
    body: Any
    authorization: str


class RewardServer:
    """Answers POST requests by `answer(body, number)`, number from 0. A context manager."""

    def __init__(self, answer: Callable[[Any, int], HttpReply], port: int = 0) -> None:
        self.seen: list[Seen] = []
        self.under_way = 0
        self.most_under_way = 0
        self._answer = answer
        self._lock = threading.Lock()
        self._closing = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                outer._serve(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        class Server(ThreadingHTTPServer):
            allow_reuse_address = True
            daemon_threads = True
            block_on_close = False
            request_queue_size = 64

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that is gone is not an error of a test."""

        self._server = Server(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> RewardServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            number = len(self.seen)
            self.seen.append(Seen(handler.path, body, handler.headers.get("Authorization", "")))
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            self._send(handler, self._answer(body, number))
        finally:
            with self._lock:
                self.under_way -= 1

    def _send(self, handler: BaseHTTPRequestHandler, reply: HttpReply) -> None:
        if self._closing.wait(reply.after_s):
            handler.close_connection = True
            return
        body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        handler.send_response(reply.status)
        for name, value in reply.headers:
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if reply.cut:
            handler.wfile.write(body[: len(body) // 2])
            handler.wfile.flush()
            handler.close_connection = True
            return
        for start in range(len(body)) if reply.drip_s else ():
            handler.wfile.write(body[start : start + 1])
            handler.wfile.flush()
            time.sleep(reply.drip_s)
        if not reply.drip_s:
            handler.wfile.write(body)


def rewards(of: Callable[[str, str], float]) -> Callable[[Any, int], HttpReply]:
    """Answers a request of OpenRLHF's form with of(response, label) for each sample."""

    def answer(body: Any, number: int) -> HttpReply:
        texts = zip(body["query"], body["prompts"], body["labels"])
        values = [of(query[len(prompt) :], label) for query, prompt, label in texts]
        return HttpReply(body={"rewards": values, "scores": values, "extra_logs": {}})

    return answer


def judgement(text: str) -> HttpReply:
    """A chat completion that says `text`."""
    message = {"role": "assistant", "content": text}
    return HttpReply(body={"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
