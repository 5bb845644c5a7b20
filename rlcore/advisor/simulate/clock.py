"""An event loop whose clock jumps: waiting takes no real time, and every run is deterministic."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from rlcore.errors import StageError

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that sets the clock to the next timer instead of sleeping until then."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("deadlock: the simulated run waits for what will never happen")
        if not ready and timeout:
            self.now += timeout
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop with its own clock, which starts at 0. Work for a thread runs at once and
    takes no time."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as e:  # whatever a thread would have raised reaches whoever waits for it
            done.set_exception(e)
        return done


def run_simulated(main: Coroutine[Any, Any, T], *, limit_s: float | None = 1e6) -> T:
    """Run a coroutine on a `SimulatedLoop`.

    Raises TimeoutError after `limit_s` simulated seconds; without a limit, RuntimeError when
    nothing is left that could happen.
    """

    async def limited() -> T:
        async with asyncio.timeout(limit_s):
            return await main

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(limited())


class After:
    """An awaitable that is done some seconds after it was made, or fails with the text `fails`."""

    def __init__(self, seconds: float, fails: str = "") -> None:
        self._at = asyncio.get_running_loop().time() + seconds
        self._fails = fails

    def __await__(self) -> Generator[Any, None, None]:
        yield from asyncio.sleep(self._at - asyncio.get_running_loop().time()).__await__()
        if self._fails:
            raise StageError(self._fails)
