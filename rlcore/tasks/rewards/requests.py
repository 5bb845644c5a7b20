"""The thread that all requests of a scorer are made in, and the queue of one reward in it."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import aiohttp

from rlcore.errors import DeadlineExceeded, StageError
from rlcore.tasks.rewards.endpoint import Endpoint
from rlcore.tasks.rewards.protocols import Asked, Reward, Tell, Unjudged, Verdict
from rlcore.tasks.rewards.specs import BatchedSpec, EndpointSpec

CLOSE_S = 20.0
S = TypeVar("S", bound=EndpointSpec)


class RequestThread:
    """An event loop in a thread of its own, with the connections of all rewards."""

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
        """Drop what is under way and end the thread."""
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
    up to `batch_size` samples; of one sample where the settings are not a `BatchedSpec`."""

    path: ClassVar[str] = ""  # what is asked for, behind the address of the settings

    def __init__(
        self, key: str, spec: S, thread: RequestThread, note: Callable[[str], None]
    ) -> None:
        """`key`: the config key of `spec`. `note`: told of a circuit breaker that opens or closes.
        Raises UserError if the environment has no variable `api_key_env`."""
        self._spec = spec
        self._endpoint = Endpoint(key, spec, path=self.path, note=note)
        self._thread = thread
        self._batch_size, self._batch_wait_s = 1, 0.0
        if isinstance(spec, BatchedSpec):
            self._batch_size, self._batch_wait_s = spec.batch_size, spec.batch_wait_s
        self._queue: asyncio.Queue[tuple[Asked, Tell]] = asyncio.Queue()
        # Idle workers would otherwise share what comes, one sample each.
        self._collecting = asyncio.Lock()
        thread.start(self._serve(spec.concurrency))

    @abstractmethod
    async def ask(
        self, session: aiohttp.ClientSession, batch: Sequence[Asked]
    ) -> list[float | Unjudged | Verdict]:
        """One request: a verdict for each sample, or what kept one from being judged. Raises
        Unjudged if it is about all of them."""

    def submit(self, asked: Asked, tell: Tell) -> None:
        self._thread.call(self._queue.put_nowait, (asked, tell))

    def check(self) -> None:
        if self._thread.error is not None:
            raise StageError(f"scoring failed: {self._thread.error!r}") from self._thread.error

    def close(self) -> None:
        """Nothing of its own: the thread is closed once for all."""

    async def _serve(self, concurrency: int) -> None:
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # `concurrency` is the limit
            timeout=aiohttp.ClientTimeout(total=None),  # `Endpoint` has deadlines
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
            try:
                results = await self.ask(session, [asked for asked, _ in batch])
            except Unjudged as e:
                results = [e] * len(batch)
            seconds = time.monotonic() - started
            for (_, tell), result in zip(batch, results, strict=True):
                tell(_verdict(result, seconds))

    async def _batch(self) -> list[tuple[Asked, Tell]]:
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


def _verdict(result: float | Unjudged | Verdict, seconds: float) -> Verdict:
    if isinstance(result, Unjudged):
        return Verdict(result.status, error=str(result), seconds=seconds)
    value, parts = (result.value, result.parts) if isinstance(result, Verdict) else (result, {})
    return Verdict("ok", value, parts, seconds=seconds)
