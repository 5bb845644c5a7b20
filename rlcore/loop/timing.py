"""Time in the loop: the event loop's clock, short turns of the event loop, and a record of who
worked and who waited."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rlcore.interfaces import Span


def now() -> float:
    """Seconds on the clock of the running event loop; only differences are meaningful."""
    return asyncio.get_running_loop().time()


@dataclass(slots=True)
class Clocks:
    """Seconds of one step, by what they were spent on. Example: Clocks({"learn": 1.5})"""

    parts: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the duration of the block to a part."""
        start = now()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + now() - start


CALLS = 32  # to processes that begin in one turn: each is serialised there
ITEMS = 64  # of a long list that are worked on in one turn
T = TypeVar("T")


class TurnLimit:
    """Admits so many callers in each turn of the loop, in the order in which they came."""

    def __init__(self, per_turn: int = CALLS) -> None:
        self._per_turn = per_turn
        self._begun = 0  # in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next(self) -> None:
        """Return in this turn if it has a free place, else in a later one."""
        loop = asyncio.get_running_loop()
        if not self._begun and not self._waiting:
            loop.call_soon(self._turned)
        if self._begun < self._per_turn and not self._waiting:
            self._begun += 1
            return
        waiting: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiting)
        await waiting

    def _turned(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < self._per_turn:
            waiting = self._waiting.popleft()
            if not waiting.done():  # its caller may have been cancelled
                waiting.set_result(None)
                self._begun += 1
        if self._begun:
            asyncio.get_running_loop().call_soon(self._turned)


async def in_turns(items: Iterable[T], per_turn: int = ITEMS) -> AsyncIterator[T]:
    """The items, a few in each turn of the loop."""
    for i, item in enumerate(items):
        if i and i % per_turn == 0:
            await asyncio.sleep(0)
        yield item


LEARNER, PUBLICATIONS = "learner", "publications"
MOST_BEATS = 12  # intervals of an actor that a step's line has at most
BEATS_KEPT = 4096  # of a step that lasts for hours


class Timeline:
    """Spans since the last `take`, in seconds of training time since step 0."""

    def __init__(self) -> None:
        self._origin: float | None = None
        self._spans: list[Span] = []
        self._doing: tuple[str, float] | None = None  # what the learner does, since when

    def begin(self, seconds: float) -> None:
        """Count from here on, `seconds` after step 0."""
        self._origin = now() - seconds
        self._spans = []
        self._doing = None if self._doing is None else (self._doing[0], now())

    def turn(self, what: str) -> None:
        """The learner does something else from now on."""
        at = now()
        if self._doing is not None:
            self.add(LEARNER, self._doing[0], self._doing[1], at)
        self._doing = (what, at)

    def add(self, who: str, what: str, start: float, end: float, share: float = 1.0) -> None:
        """A span on the loop's clock; `share` of it was spent at work."""
        if self._origin is not None and end > start:
            since, until = (round(t - self._origin, 3) for t in (start, end))
            self._spans.append((who, what, since, until, round(share, 3)))

    def take(self) -> list[Span]:
        """The spans since the last call; what the learner is at is cut here and goes on."""
        if self._doing is not None:
            self.turn(self._doing[0])
        spans, self._spans = self._spans, []
        return spans


class HeartbeatSpans:
    """When heartbeats of one process came, and how long it had been inside engine steps by then."""

    def __init__(self) -> None:
        self._beats: deque[tuple[float, float]] = deque(maxlen=BEATS_KEPT)

    def add(self, busy_s: float) -> None:
        """A heartbeat that came now."""
        self._beats.append((now(), busy_s))

    def take(self) -> list[tuple[float, float, float]]:
        """(start, end, share of it inside engine steps) since the last call, at most MOST_BEATS."""
        beats = list(self._beats)
        if len(beats) < 2:
            return []
        self._beats = deque(beats[-1:], maxlen=BEATS_KEPT)
        stride = -(-(len(beats) - 1) // MOST_BEATS)
        kept = [*beats[:-1:stride], beats[-1]]
        return [_interval(a, b) for a, b in itertools.pairwise(kept) if b[0] > a[0]]


def _interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    # a heartbeat describes a moment shortly before it came
    share = (after[1] - before[1]) / (after[0] - before[0])
    return before[0], after[0], min(1.0, max(0.0, share))
