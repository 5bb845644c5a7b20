"""Requests to one address: JSON over HTTP, with a deadline, retries and a circuit breaker. A failed
request gives one sentence, without the key."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from rlcore.errors import UserError
from rlcore.tasks.rewards.breaker import Breaker, CircuitOpen
from rlcore.tasks.rewards.protocols import Unjudged
from rlcore.tasks.rewards.specs import EndpointSpec

MAX_REPLY = 64 << 20  # bytes
SHOWN = 120  # characters of a reply that are shown
RETRIED = (408, 425, 429)

T = TypeVar("T")


class _Again(Exception):
    """An attempt failed in a way that another one may not. `wait_s`: what the server asked for."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class Endpoint:
    """POST requests of one reward. `key`: the config key of its settings.

    Raises UserError if the environment has no variable `api_key_env`.
    """

    def __init__(
        self, key: str, spec: EndpointSpec, *, path: str = "", note: Callable[[str], None]
    ) -> None:
        self._spec = spec
        self._name = key
        self._url = _with_path(spec.url, path)
        self._secret = api_key(key, spec)
        self._breaker = Breaker(
            key, failures=spec.breaker_failures, rest_s=spec.breaker_rest_s, note=note
        )

    async def post(
        self,
        session: aiohttp.ClientSession,
        payload: Mapping[str, Any],
        read: Callable[[Any], T],
    ) -> T:
        """What `read` makes of the reply's JSON. `read` raises ValueError for a reply of another
        form.

        Raises Unjudged: "timeout" past the deadlines, "error" for everything else.
        """
        try:
            await self._breaker.admit()
        except CircuitOpen as e:
            raise Unjudged(str(e)) from e
        try:
            result = read(await self._within_deadline(session, payload))
        except Unjudged as e:
            self._breaker.failed(str(e))
            raise
        except ValueError as e:
            self._breaker.failed(f"the reply of {self._shown} {e}")
            raise Unjudged(f"the reply of {self._shown} {e}") from e
        except BaseException:
            self._breaker.withdrawn()
            raise
        self._breaker.succeeded()
        return result

    async def _within_deadline(
        self, session: aiohttp.ClientSession, payload: Mapping[str, Any]
    ) -> Any:
        body = json.dumps(payload).encode()
        last: list[str] = []
        try:
            async with asyncio.timeout(self._spec.deadline_s):
                return await self._attempts(session, body, last)
        except TimeoutError as e:
            limit = f"deadline_s={self._spec.deadline_s:g}"
            so_far = f", after: {last[-1]}" if last else ""
            raise Unjudged(f"no answer of {self._shown} within {limit}{so_far}", "timeout") from e

    async def _attempts(self, session: aiohttp.ClientSession, body: bytes, last: list[str]) -> Any:
        """The reply's JSON after as many attempts as it takes; `last` collects why they failed."""
        spec = self._spec
        for attempt in range(spec.retries + 1):
            late = False
            wait_s = spec.retry_wait_s * 2**attempt
            try:
                async with asyncio.timeout(spec.request_timeout_s):
                    return await self._attempt(session, body)
            except TimeoutError:
                late = True
                last.append(
                    f"{self._shown} did not answer within "
                    f"request_timeout_s={spec.request_timeout_s:g}"
                )
            except _Again as e:
                wait_s = max(wait_s, e.wait_s)
                last.append(str(e))
            if attempt == spec.retries:
                tried = f"tried {attempt + 1} times, the last: " if attempt else ""
                raise Unjudged(f"{tried}{last[-1]}", "timeout" if late else "error")
            await asyncio.sleep(wait_s)
        raise AssertionError("unreachable: the last attempt raises")

    async def _attempt(self, session: aiohttp.ClientSession, body: bytes) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._secret:
            headers["Authorization"] = f"Bearer {self._secret}"
        try:
            async with session.post(
                self._url,
                data=body,
                headers=headers,
                proxy=_proxy(self._url),
                allow_redirects=False,
            ) as reply:
                text = self._redacted((await _read(reply)).decode("utf-8", "replace"))
                status, wait_s = reply.status, _retry_after(reply)
        except (aiohttp.ClientError, OSError) as e:
            why = self._redacted(f"{type(e).__name__}: {e}")
            raise _Again(f"{self._shown}: {why}") from e
        if status in RETRIED or status >= 500:
            raise _Again(f"{self._shown} answered status {status}: {_start(text)}", wait_s)
        if not 200 <= status < 300:
            raise Unjudged(f"{self._shown} answered status {status}: {_start(text)}")
        try:
            return json.loads(text)
        except ValueError as e:
            raise Unjudged(f"the reply of {self._shown} is not JSON: {_start(text)}") from e

    @property
    def _shown(self) -> str:
        """The address without its query."""
        return urlunsplit(urlsplit(self._url)._replace(query="", fragment=""))

    def _redacted(self, text: str) -> str:
        """Servers repeat keys in their messages."""
        return text.replace(self._secret, "***") if self._secret else text


def api_key(key: str, spec: EndpointSpec) -> str:
    """The key of an endpoint, "" if it needs none. Raises UserError if the variable is not set."""
    if spec.api_key_env is None:
        return ""
    value = os.environ.get(spec.api_key_env, "").strip()
    if not value:
        raise UserError(
            f"{key}.api_key_env={spec.api_key_env} names a variable that is not set in the "
            "environment of the graders: export it before the command (in a Ray cluster that was "
            "started before: before `ray start`), or leave the setting null."
        )
    return value


async def _read(reply: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in reply.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > MAX_REPLY:
            raise Unjudged(f"a reply is longer than {MAX_REPLY >> 20} MiB")
    return bytes(body)


def _with_path(url: str, path: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + path)) if path else url


def _proxy(url: str) -> str | None:
    """What HTTP_PROXY, HTTPS_PROXY and NO_PROXY say. Not aiohttp's `trust_env`, which also sends
    passwords that it finds in ~/.netrc."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return None if proxy_bypass(host) else getproxies().get(parts.scheme)


def _retry_after(reply: aiohttp.ClientResponse) -> float:
    """Seconds; 0 without one, or with a date."""
    value = reply.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0


def _start(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 3] + "...")
