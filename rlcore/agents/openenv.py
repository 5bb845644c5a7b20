"""Environments of OpenEnv, each a separate server, on this machine or elsewhere.

The protocol is openenv-core 0.3 (openenv/core/env_server/http_server.py). A WebSocket at
/ws is a session with its own instance, and every message is answered by an observation or an
error. The server runs in its own Python environment, so that its packages are not rlcore's.
Its HTTP calls /reset and /step make a new instance for each and cannot hold an episode.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
from typing import Any
from urllib.parse import urlsplit

from rlcore.environments.protocol import Action, Environment, Opening, Reply
from rlcore.errors import UserError
from rlcore.types import Grade, Item

KEY = "environment.args"
TOKEN = "OPENENV_TOKEN"  # variable with the key of a server that asks for one
MAX_SEED = 1 << 31
MAX_MESSAGE = 16 << 20  # bytes
CONNECT_S = 10.0  # what follows is under the environment's own deadlines


class OpenEnv(Environment):
    """A session with the server at `url` (http://127.0.0.1:8000), over any task.

    `action`: the field of the server's action that holds what the model says. `shown`: the field of
    its observation that the model reads; None: the whole observation as JSON. `prompt` comes before
    the first observation, and `{question}` in it is the task's problem. The reward is the sum of
    what the server gives; none at all is a failed score. `remote`: the server may be on another
    machine, which is sent what the model says, and the key of the variable OPENENV_TOKEN.
    """

    def __init__(
        self,
        *,
        url: str,
        action: str = "message",
        shown: str | None = None,
        prompt: str = "",
        remote: bool = False,
    ) -> None:
        """Raises UserError for an address that is not this machine's own, unless `remote`."""
        if not isinstance(url, str):
            raise ValueError(f"url must be a text such as http://127.0.0.1:8000, not {url!r}")
        self._url = _address(url, remote=remote is True)
        self._action = action
        self._shown = shown
        self._prompt = prompt
        self._loop: asyncio.AbstractEventLoop | None = None

    def reset(self, item: Item, seed: int) -> Opening:
        self._loop = asyncio.new_event_loop()
        self._rewarded = 0
        self._over = False
        self._run(self._connect())
        seen = self._called("reset", {"seed": seed % MAX_SEED})
        prompt = self._prompt.replace("{question}", item.question)
        text = "\n\n".join(part for part in (prompt, self._text(seen)) if part)
        return Opening([{"role": "user", "content": text}])

    def step(self, action: Action) -> Reply:
        seen = self._called("step", {self._action: action.text})
        reward = seen.get("reward")
        self._rewarded += reward is not None
        self._over = bool(seen.get("done", False))
        text = [{"role": "user", "content": self._text(seen)}]
        return Reply(text, self._over, reward=None if reward is None else float(reward))

    def grade(self) -> Grade:
        if not self._rewarded:
            raise ValueError("the OpenEnv server has given no reward")
        return Grade(0.0, {"finished": float(self._over)})

    def close(self) -> None:
        """End the session."""
        if self._loop is not None:
            self._run(self._disconnect())
            self._loop.close()
            self._loop = None

    def _run(self, work: Any) -> Any:
        assert self._loop is not None
        return self._loop.run_until_complete(work)

    async def _connect(self) -> None:
        import aiohttp

        token = os.environ.get(TOKEN)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = aiohttp.ClientSession(headers=headers)
        try:
            async with asyncio.timeout(CONNECT_S):
                self._socket = await self._client.ws_connect(self._url, max_msg_size=MAX_MESSAGE)
        except (aiohttp.ClientError, OSError) as error:
            await self._client.close()
            raise ConnectionError(f"{KEY}.url={self._url} does not answer: {error}") from error

    async def _disconnect(self) -> None:
        await self._socket.close()
        await self._client.close()

    def _called(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._run(self._exchange({"type": kind, "data": data}))
        if answer.get("type") != "observation":
            told = answer.get("data", {})
            raise RuntimeError(
                f"the OpenEnv server answers {kind} with {told.get('code', answer.get('type'))}: "
                f"{told.get('errors') or told.get('message')}"
            )
        seen: dict[str, Any] = answer["data"]
        return seen

    async def _exchange(self, message: dict[str, Any]) -> Any:
        await self._socket.send_str(json.dumps(message))
        answer = await self._socket.receive()
        if not isinstance(answer.data, str):
            raise ConnectionError("the OpenEnv server has ended the session")
        return json.loads(answer.data)

    def _text(self, seen: dict[str, Any]) -> str:
        observation = seen["observation"]
        if self._shown is None:
            return json.dumps(observation)
        if self._shown not in observation:
            raise KeyError(
                f"{KEY}.shown={self._shown} is not a field of the observation, which has "
                f"{', '.join(observation)}"
            )
        return str(observation[self._shown])


def _address(url: str, *, remote: bool) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        own = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        own = False
    if parts.scheme not in ("http", "ws", "https", "wss") or not host:
        raise UserError(
            f"{KEY}.url={url} is not accepted: give the address of a server, such as "
            "http://127.0.0.1:8000."
        )
    if not own and not remote:
        raise UserError(
            f"{KEY}.url={url} is not accepted: it is not on this machine. {KEY}.remote=true has "
            "it play, and sends it what the model says."
        )
    scheme = "wss" if parts.scheme in ("https", "wss") else "ws"
    return f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}/ws"
