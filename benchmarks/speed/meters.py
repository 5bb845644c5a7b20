"""Processor time, stalls and bytes of the processes that a simulation hosts in one thread."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rlcore.advisor.simulate.clock import SimulatedLoop

OUTSIDE = "(simulation)"  # the simulated clock and what belongs to no process
ROLE: contextvars.ContextVar[str] = contextvars.ContextVar("role", default="controller")


@dataclass
class Meter:
    """What each role has used. A stall is what a role computes in one turn of the loop, in which it
    hears of nothing; where messages are taken one at a time, see `piece_s`."""

    cpu_s: Counter[str] = field(default_factory=Counter)
    stall_s: dict[str, float] = field(default_factory=dict)  # the longest
    piece_s: dict[str, float] = field(default_factory=dict)  # the longest without a switch
    spent_in: dict[str, str] = field(default_factory=dict)  # the coroutine of that piece
    sent: Counter[str] = field(default_factory=Counter)  # bytes of messages, without payloads
    received: Counter[str] = field(default_factory=Counter)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)  # (sender, "role.method")
    role: str = OUTSIDE
    _since: float = 0.0
    _handle: Any = None
    _turn_s: Counter[str] = field(default_factory=Counter)

    def switch(self, role: str) -> str:
        """Charge the time since the last switch to the role before; that role."""
        now = time.thread_time()
        before, spent = self.role, now - self._since
        self._turn_s[before] += spent
        if spent > self.piece_s.get(before, 0.0):
            self.piece_s[before] = spent
            self.spent_in[before] = _described(self._handle)
        self.role, self._since = role, time.thread_time()
        return before

    def turn(self) -> None:
        """The loop looks for what has happened."""
        for role, spent in self._turn_s.items():
            self.cpu_s[role] += spent
            self.stall_s[role] = max(spent, self.stall_s.get(role, 0.0))
        self._turn_s.clear()

    def message(self, receiver: str, method: str, content: Any, *, decode: bool = True) -> None:
        """The running role sends this to another one: both pay for its pickling."""
        data = pickle.dumps(content, protocol=5)
        self.calls[self.role, f"{receiver}.{method}"] += 1
        self.count(receiver, len(data))
        if decode:
            before = self.switch(receiver)
            pickle.loads(data)
            self.switch(before)

    def count(self, receiver: str, size: int) -> None:
        """Count bytes from the running role."""
        self.sent[self.role] += size
        self.received[receiver] += size

    def reset(self) -> None:
        """Begin to count."""
        for counts in (self.cpu_s, self.sent, self.received, self.calls):
            counts.clear()
        for longest in (self.stall_s, self.piece_s, self.spent_in):
            longest.clear()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Charge whatever the event loop runs to the role that its context names."""
        plain, once, meter = asyncio.Handle._run, SimulatedLoop._run_once, self

        def run(handle: Any) -> None:
            meter._handle = handle
            meter.switch(handle._context.get(ROLE, "controller"))
            plain(handle)
            meter.switch(OUTSIDE)

        def run_once(loop: Any) -> None:
            meter.turn()
            once(loop)

        asyncio.Handle._run = run  # type: ignore[method-assign]
        SimulatedLoop._run_once = run_once  # type: ignore[method-assign]
        try:
            yield
        finally:
            asyncio.Handle._run = plain  # type: ignore[method-assign]
            SimulatedLoop._run_once = once  # type: ignore[method-assign]


def _described(handle: Any) -> str:
    """The coroutine that a handle runs, innermost first."""
    task = getattr(getattr(handle, "_callback", None), "__self__", None)
    coroutine = task.get_coro() if isinstance(task, asyncio.Task) else None
    return getattr(coroutine, "__qualname__", "a callback")


def in_role(role: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that starts tasks, which then belong to a role."""
    context = contextvars.copy_context()
    context.run(ROLE.set, role)
    return context.run(function, *args)


class Across:
    """An object in another process: its coroutines are charged to that role, and what goes in and
    out of them is a message. `payload`: methods whose records are counted by the caller instead."""

    def __init__(self, target: Any, role: str, meter: Meter, payload: tuple[str, ...] = ()) -> None:
        self._target = target
        self._role = role
        self._meter = meter
        self._payload = payload

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not inspect.iscoroutinefunction(found):
            return found

        async def call(*args: Any, **named: Any) -> Any:
            meter, role, plain = self._meter, self._role, name not in self._payload
            if meter.role == role:
                return await found(*args, **named)
            if plain:
                meter.message(role, name, (args, named))
            else:
                meter.calls[meter.role, f"{role}.{name}"] += 1
            # a task of that role, so that what wakes it is charged to the role too
            result = await in_role(role, asyncio.create_task, found(*args, **named))
            if plain and result is not None:
                sender = meter.switch(role)
                meter.message(sender, f"answer to {name}", result)
                meter.switch(sender)
            return result

        return call
