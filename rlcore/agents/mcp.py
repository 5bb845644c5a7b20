"""The tools of a Model Context Protocol server, over a task's problems.

The server is a program of a user's that speaks the protocol over its input and output, a message a
line (modelcontextprotocol.io/specification/2025-06-18, transport "stdio"). Each episode has its own
server, which ends with it, so that no other episode sees what tools have changed.

The client of the package mcp 2.3 is not used: it starts a server in another session, which the
SIGKILL to an episode's process group at its deadline would not reach (mcp/client/stdio.py). After
output that is not JSON, it goes on waiting.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlcore.environments.protocol import MAX_ERROR, Action, Environment, Message, Opening, Reply
from rlcore.errors import UserError
from rlcore.interfaces import Task
from rlcore.tasks.grades import grade_text
from rlcore.types import Grade, Item

VERSION = "2025-06-18"
NOT_FOUND = -32601  # JSON-RPC's code of a method that is not there
END_S = 2.0
KEY = "environment.args.command"


class ServerFailed(Exception):
    """The server ended, or answered with what is not a message of the protocol."""


class RemoteError(Exception):
    """The server answered a request by an error."""


class StdioServer:
    """A server's process, and the requests to it. Waits for answers without a deadline: the
    environment's deadlines end its process."""

    def __init__(self, words: Sequence[str]) -> None:
        """Raises UserError for a command that cannot be started, ServerFailed as `request` does."""
        try:
            self._process = subprocess.Popen(
                list(words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError as error:
            raise UserError(f"{KEY}={shlex.join(words)} cannot be started: {error}.") from error
        self._count = 0
        about = {"name": "rlcore", "version": "1"}
        given = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": about}
        self.request("initialize", given)
        self._send({"method": "notifications/initialized"})

    def request(self, method: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a request. Raises RemoteError for one that the server refuses, ServerFailed
        if it has ended."""
        self._count += 1
        self._send({"id": self._count, "method": method, "params": given})
        for message in self._messages():
            if "method" in message:
                self._answer(message)
            elif message.get("id") == self._count:
                if "error" in message:
                    raise RemoteError(str(message["error"].get("message", message["error"])))
                result: dict[str, Any] = message["result"]
                return result
        raise ServerFailed(f"the server of {KEY} ended during {method}")

    def _answer(self, message: Mapping[str, Any]) -> None:
        """Answer a request of the server; notifications need none."""
        if "id" not in message:
            return
        if message["method"] == "ping":
            self._send({"id": message["id"], "result": {}})
        else:
            error = {"code": NOT_FOUND, "message": "rlcore serves no requests"}
            self._send({"id": message["id"], "error": error})

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ServerFailed(f"the server of {KEY} has ended") from error

    def _messages(self) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                message = json.loads(line)
            except ValueError as error:
                raise ServerFailed(f"the server of {KEY} wrote what is not JSON") from error
            if not isinstance(message, dict):
                raise ServerFailed(f"the server of {KEY} wrote something that is not a JSON object")
            yield message

    def tools(self) -> list[dict[str, Any]]:
        """All tools, in OpenAI's form."""
        found: list[dict[str, Any]] = []
        given: dict[str, Any] = {}
        while True:
            page = self.request("tools/list", given)
            found += map(_function, page["tools"])
            if not page.get("nextCursor"):
                return found
            given = {"cursor": page["nextCursor"]}

    def close(self) -> None:
        """End the process: first by the end of its input, as the protocol has it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool["inputSchema"]}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


class McpTools(Environment):
    """Any task, with the tools of a server; the first turn that calls none is the answer, which the
    task grades.

    `command`: the server's command line, which no shell reads. `tools`: names of those that the
    model is shown; null: all.
    """

    asks_task = True

    def __init__(
        self, task: Task, *, command: str = "", tools: Sequence[str] | None = None
    ) -> None:
        if not isinstance(command, str) or not command.strip():
            raise UserError(
                f"{KEY} is missing: environment.name=mcp starts a server of yours, such as "
                '"python server.py".'
            )
        self._task = task
        self._words = shlex.split(command)
        self._names = None if tools is None else list(tools)
        self._server: StdioServer | None = None

    def reset(self, item: Item, seed: int) -> Opening:
        self._item = item
        self._answer = ""
        self._calls = self._failed = 0
        self._server = StdioServer(self._words)
        tools = self._server.tools()
        known = {tool["function"]["name"]: tool for tool in tools}
        unknown = [name for name in self._names or () if name not in known]
        if unknown:
            raise UserError(
                f"environment.args.tools: the server has no {unknown[0]}; choose out of: "
                f"{', '.join(known)}."
            )
        chosen = tools if self._names is None else [known[name] for name in self._names]
        self._known = {tool["function"]["name"] for tool in chosen}
        return Opening(item.opening(), chosen)

    def step(self, action: Action) -> Reply:
        if not action.tool_calls:
            self._answer = action.text
            return Reply(over=True)
        return Reply([self._called(c.name, dict(c.arguments)) for c in action.tool_calls])

    def _called(self, name: str, arguments: dict[str, Any]) -> Message:
        self._calls += 1
        text, failed = self._result(name, arguments)
        self._failed += failed
        if failed:
            text = text if text.startswith("Error") else f"Error: {text}"
            text = text[:MAX_ERROR]
        return {"role": "tool", "name": name, "content": text}

    def _result(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """(text of a tool's answer, whether it is an error)."""
        if name not in self._known:
            return f"there is no tool {name}; choose one of: {', '.join(sorted(self._known))}", True
        assert self._server is not None
        try:
            result = self._server.request("tools/call", {"name": name, "arguments": arguments})
        except RemoteError as error:
            return str(error), True
        texts = []
        for block in result.get("content", ()):
            if block.get("type") != "text":
                return f"the tool answered by {block.get('type')}, and only text is read", True
            texts.append(block["text"])
        return "\n".join(texts), bool(result.get("isError"))

    def grade(self) -> Grade:
        verdict = grade_text(self._task, self._item, self._answer)
        counts = {"calls": float(self._calls), "failed_calls": float(self._failed)}
        return Grade(verdict.reward, {**verdict.parts, **counts})

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.close()
            self._server = None
