"""The thread in which all requests of a scorer are made, and the queue of one reward in it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar
from urllib.parse import urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from rlcore.errors import DeadlineExceeded, StageError, UserError
from rlcore.tasks.rewards.protocols import Reward, RewardQuery, RewardVerdict, Tell, Unjudged
from rlcore.tasks.rewards.specs import BatchedSpec, EndpointSpec


class CircuitOpen(Exception):
    """The service is not asked for a while; the message says why and for how long."""


class Breaker:
    """Closed, it lets every request pass. After `failures` failed ones in a row it opens: requests
    fail at once. `rest_s` later one request is tried while the others wait for its outcome, which
    closes the breaker or opens it again.

    Used by the tasks of one event loop. note: called with a sentence when it opens and closes.
    """

    def __init__(
        self,
        name: str,
        *,
        failures: int,
        rest_s: float,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._failures = failures
        self._rest_s = rest_s
        self._note = note
        self._clock = clock
        self._in_a_row = 0
        self._last = ""
        self._opened_at: float | None = None
        self._reopens_at = 0.0
        self._trial_over: asyncio.Event | None = None  # set when the request that is tried is over

    @property
    def open(self) -> bool:
        return self._opened_at is not None

    async def admit(self) -> None:
        """Return if a request may be made; `succeeded`, `failed` or `withdrawn` must follow. Raises
        CircuitOpen."""
        while self.open:
            if self._clock() < self._reopens_at:
                raise CircuitOpen(
                    f"the circuit breaker is open after {self._in_a_row} failed requests in a row, "
                    f"the last: {self._last}"
                )
            if self._trial_over is None:
                self._trial_over = asyncio.Event()
                return
            # The request that is tried has a deadline.
            await self._trial_over.wait()

    def succeeded(self) -> None:
        if self._opened_at is not None:
            away = self._clock() - self._opened_at
            self._note(f"{self._name} answers again, {away:.0f} s after its circuit breaker opened")
        self._opened_at = None
        self._in_a_row = 0
        self._end_trial()

    def failed(self, why: str) -> None:
        """A request failed with all its retries. Requests that were under way as the breaker opened
        count, and change nothing else."""
        self._in_a_row += 1
        self._last = why
        if self._opened_at is None and self._in_a_row >= self._failures:
            self._opened_at = self._clock()
            self._reopens_at = self._opened_at + self._rest_s
            self._note(
                f"the circuit breaker of {self._name} is open: {self._in_a_row} requests in a row "
                f"failed, the last: {why}; its samples fail at once, and every {self._rest_s:g} s "
                "one request is tried"
            )
        elif self._trial_over is not None:
            self._reopens_at = self._clock() + self._rest_s
        self._end_trial()

    def withdrawn(self) -> None:
        """The request was cancelled: nothing is known."""
        self._end_trial()

    def _end_trial(self) -> None:
        if self._trial_over is not None:
            self._trial_over.set()
            self._trial_over = None


MAX_REPLY = 64 << 20  # bytes
SHOWN = 120  # characters of a reply that are shown
RETRIED = (408, 425, 429)
T = TypeVar("T")


class _Again(Exception):
    """An attempt failed in a way that another one may not. `wait_s`: seconds that the server asked
    to wait."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class RewardEndpoint:
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
        """Post `payload` and return the result of `read` on the reply's JSON. Errors of `read` are
        about the reply; the text of a ValueError is reported.

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
        except Exception as e:  # of any kind: the service decides what its replies hold
            why = f"the reply of {self._shown} cannot be read: {type(e).__name__}: {e}"
            self._breaker.failed(why)
            raise Unjudged(why) from e
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
        """The reply's JSON after as many attempts as it takes; `last` collects the reasons of
        failures."""
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
        except (ValueError, RecursionError) as e:
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
            f"{key}.api_key_env={spec.api_key_env} names a variable that the graders do not "
            "have: export it before the command (before `ray start` of a cluster that is joined), "
            "or leave the setting null."
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
    """Return the proxy that HTTP_PROXY, HTTPS_PROXY and NO_PROXY set; none to this machine itself,
    which a proxy cannot reach. Not aiohttp's `trust_env`, which also sends passwords that it finds
    in ~/.netrc."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    here = re.fullmatch(r"localhost|127(\.\d+){3}|::1", host)
    return None if here or proxy_bypass(host) else getproxies().get(parts.scheme)


def _retry_after(reply: aiohttp.ClientResponse) -> float:
    """Seconds of the header Retry-After; 0 without it, or with a date."""
    value = reply.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0


def _start(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 3] + "...")


CLOSE_S = 20.0
S = TypeVar("S", bound=EndpointSpec)


class RequestThread:
    """An event loop in its own thread, with the connections of all rewards."""

    def __init__(self) -> None:
        self.error: BaseException | None = None  # that ended a task which must not end
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="reward-requests", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine until `close`."""
        self._loop.call_soon_threadsafe(self._start, work)

    def call(self, function: Any, *args: Any) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    def close(self) -> None:
        """Drop pending requests and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise DeadlineExceeded(
                f"the requests of rewards did not end within {CLOSE_S:g} s of closing them"
            )

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            for task in self._tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        finally:
            self._loop.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.error = task.exception()


class RequestReward(Reward, ABC, Generic[S]):
    """A reward that is asked by requests to one address, `concurrency` of them at a time, each of
    up to `batch_size` samples. A request has one sample where the settings are not a
    `BatchedSpec`."""

    path: ClassVar[str] = ""  # what is asked for, behind the address of the settings

    def __init__(
        self, key: str, spec: S, thread: RequestThread, note: Callable[[str], None]
    ) -> None:
        """`key`: the config key of `spec`. `note`: called when a circuit breaker opens or closes.
        Raises UserError if the environment has no variable `api_key_env`."""
        self._spec = spec
        self._endpoint = RewardEndpoint(key, spec, path=self.path, note=note)
        self._thread = thread
        self._batch_size, self._batch_wait_s = 1, 0.0
        if isinstance(spec, BatchedSpec):
            self._batch_size, self._batch_wait_s = spec.batch_size, spec.batch_wait_s
        self._queue: asyncio.Queue[tuple[RewardQuery, Tell]] = asyncio.Queue()
        # Idle workers would otherwise share arriving samples, one each.
        self._collecting = asyncio.Lock()
        thread.start(self._serve(spec.concurrency))

    @abstractmethod
    async def ask(
        self, session: aiohttp.ClientSession, batch: Sequence[RewardQuery]
    ) -> list[float | Unjudged | RewardVerdict]:
        """Make one request; returns for each sample a verdict, or the error that prevented it.
        Raises Unjudged if the error concerns all of them."""

    def submit(self, asked: RewardQuery, tell: Tell) -> None:
        self._thread.call(self._queue.put_nowait, (asked, tell))

    def check(self) -> None:
        if self._thread.error is not None:
            raise StageError(f"scoring failed: {self._thread.error!r}") from self._thread.error

    def close(self) -> None:
        """Close nothing: the thread is closed once, for all rewards."""

    async def _serve(self, concurrency: int) -> None:
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # `concurrency` is the limit
            timeout=aiohttp.ClientTimeout(total=None),  # `RewardEndpoint` has deadlines
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        async with session, asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._work(session))

    async def _work(self, session: aiohttp.ClientSession) -> None:
        while True:
            async with self._collecting:
                batch = await self._batch()
            started = time.monotonic()
            results = await self._asked(session, [asked for asked, _ in batch])
            seconds = time.monotonic() - started
            for (_, tell), result in zip(batch, results, strict=True):
                tell(_verdict(result, seconds))

    async def _asked(
        self, session: aiohttp.ClientSession, batch: Sequence[RewardQuery]
    ) -> Sequence[float | Unjudged | RewardVerdict]:
        """A result for each sample, whatever `ask` does."""
        try:
            results = await self.ask(session, batch)
        except Unjudged as e:
            return [e] * len(batch)
        except Exception as e:  # of any kind: the samples of this request fail, and no others
            return [Unjudged(f"{type(e).__name__}: {e}")] * len(batch)
        if len(results) != len(batch):
            return [Unjudged(f"{len(results)} verdicts on {len(batch)} samples")] * len(batch)
        return results

    async def _batch(self) -> list[tuple[RewardQuery, Tell]]:
        """The next samples: as many as there are, after a short wait for more."""
        batch = [await self._queue.get()]
        until = asyncio.get_running_loop().time() + self._batch_wait_s
        while len(batch) < self._batch_size:
            try:
                async with asyncio.timeout_at(until):
                    batch.append(await self._queue.get())
            except TimeoutError:
                break
        while len(batch) < self._batch_size and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        return batch


def _verdict(result: float | Unjudged | RewardVerdict, seconds: float) -> RewardVerdict:
    if isinstance(result, Unjudged):
        return RewardVerdict(result.status, error=str(result), seconds=seconds)
    value, parts = (
        (result.value, result.parts) if isinstance(result, RewardVerdict) else (result, {})
    )
    return RewardVerdict("ok", value, parts, seconds=seconds)
