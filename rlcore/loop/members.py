"""The rollout actors as the loop sees them: pools of one kind, members by name, their processes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from rlcore.loop.clients import ActorClient, Spawn
from rlcore.loop.timeline import Beats
from rlcore.types import POLICY, Request

Purpose = Literal["all", "training", "evaluation"]
Held = dict[int, list[Request]]  # group id -> requests of it


@dataclass(frozen=True, slots=True)
class ActorPool:
    """Actors of one kind. Example: ActorPool("fp8", spawn, count=2)"""

    label: str  # of the configuration: actor.<label>
    spawn: Spawn
    count: int  # at the start
    purpose: Purpose = "all"  # what its members are given: evaluation, everything else, or both
    # the set of a publication that its members load; None: their own weights are frozen
    weights: str | None = POLICY


class Lane:
    """Calls to one process, made one at a time and in order. `put` does not wait."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], Awaitable[object]]] = deque()
        self._running: asyncio.Task[None] | None = None

    def put(self, call: Callable[[], Awaitable[object]]) -> None:
        """Queue a call, which handles its own errors."""
        self._calls.append(call)
        if self._running is None:
            self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._calls:
                await self._calls.popleft()()
        finally:
            self._running = None

    def close(self) -> None:
        """Drop what waits and stop waiting for what was sent."""
        self._calls.clear()
        if self._running is not None:
            self._running.cancel()


@dataclass(slots=True, eq=False)
class Process:
    """One process of a member. A replacement is another one, so a late reply is never credited to
    a process that did not give it."""

    client: ActorClient
    version: int = -1  # last version whose arrival was proven on it
    status: dict[str, Any] = field(default_factory=dict)  # its newest heartbeat
    work: Lane = field(default_factory=Lane)  # submissions and withdrawals
    loading: asyncio.Task[dict[str, float]] | None = None  # on its way to the newest weights
    checking: asyncio.Task[None] | None = None  # a heartbeat that was asked for
    asked_at: float = 0.0  # when that was
    beats: Beats = field(default_factory=Beats)

    def close(self) -> None:
        """Stop waiting for anything of it."""
        self.work.close()
        for task in (self.loading, self.checking):
            if task is not None:
                task.cancel()


@dataclass(slots=True, eq=False)
class Member:
    """One rollout actor, whose process may be replaced. Example name: "bf16-0"."""

    name: str  # "<label>-<number>"
    pool: ActorPool
    process: Process
    # assigned and not known to be complete; changed by `Workload` alone
    groups: Held = field(default_factory=dict)
    load: int = 0  # requests of these groups
    number: int = -1  # its place among all members that there ever were
    failures: list[float] = field(default_factory=list)  # within the last hour, by the loop's clock
    healthy: bool = True  # its process is started and has not failed
    suspect: bool = False  # healthy, but silent: it is given nothing until it answers again

    def serves(self, group_id: int) -> bool:
        """Whether a group may be assigned to it; evaluation groups are negative."""
        purpose = self.pool.purpose
        return purpose == "all" or (purpose == "evaluation") == (group_id < 0)


@dataclass(slots=True)
class Waiting:
    """Groups to assign once more, by the reason."""

    lost: Held = field(default_factory=dict)  # of actors that failed: counted as a loss
    idle: Held = field(default_factory=dict)  # there was no actor to give them to
    # of silent actors, which go on with them if they can: assigned to another beside
    delayed: Held = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.lost or self.idle or self.delayed)

    def split(self, keep: Callable[[int], bool]) -> tuple[Waiting, Waiting]:
        """(those whose group id satisfies `keep`, the rest)."""
        kept, rest = Waiting(), Waiting()
        for name in ("lost", "idle", "delayed"):
            for group_id, requests in getattr(self, name).items():
                getattr(kept if keep(group_id) else rest, name)[group_id] = requests
        return kept, rest

    def drop(self, group_ids: Iterable[int]) -> None:
        """Forget these groups."""
        for group_id in group_ids:
            for held in (self.lost, self.idle, self.delayed):
                held.pop(group_id, None)
