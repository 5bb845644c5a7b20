"""Keeps single turns of the event loop short, whatever the number of actors and groups."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

CALLS = 32  # to processes that begin in one turn: each is serialised there
ITEMS = 64  # of a long list that are worked on in one turn

T = TypeVar("T")


class Turns:
    """Admits so many callers in each turn of the loop, in the order in which they came."""

    def __init__(self, per_turn: int = CALLS) -> None:
        self._per_turn = per_turn
        self._begun = 0  # in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next(self) -> None:
        """Return in this turn if there is room in it, else in a later one."""
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
