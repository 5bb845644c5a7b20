"""Loads new weights into rollout actors, each at its own pace."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Protocol, TypeVar

from rlcore.loop.clients import ActorClient, Publication
from rlcore.loop.members import Member, Process
from rlcore.loop.roster import Roster
from rlcore.loop.specs import ScheduleSpec, SupervisionSpec
from rlcore.loop.timing import now

# A member is a straggler when it takes so many times as long as half of the members took, and a
# heartbeat more, to load new weights
STRAGGLER = 2.0
RECHECK_S = 1.0
FEW = 16  # members still loading besides the silent ones: each that ends is looked at

T = TypeVar("T")
Loads = Mapping[Member, "asyncio.Task[dict[str, float]]"]


class Ask(Protocol):
    """`Supervisor.ask`: a call to a member's process; None if that failed."""

    async def __call__(
        self, member: Member, process: Process, call: Callable[[ActorClient], Awaitable[T]]
    ) -> T | None: ...


class _Missing:
    """Members that are still loading; each that ends is noted once, and wakes the waiter only where
    that could change its mind."""

    def __init__(self, loads: Loads) -> None:
        self._loading = {m: t for m, t in loads.items() if not t.done()}
        self._half = len(loads) / 2
        self._silent = 0  # of those, when they were last looked at
        self._ended = asyncio.Event()
        self.half_at: float | None = None  # when half of the members had the weights
        self._note_half()
        for member, task in self._loading.items():
            task.add_done_callback(partial(self._remove, member))

    def _remove(self, member: Member, task: asyncio.Task[dict[str, float]]) -> None:
        del self._loading[member]
        self._note_half()
        if len(self._loading) <= self._silent + FEW:
            self._ended.set()

    def _note_half(self) -> None:
        if self.half_at is None and len(self._loading) <= self._half:
            self.half_at = now()

    def only_silent(self) -> bool:
        """Whether all that are still loading are silent."""
        self._silent = sum(m.suspect for m in self._loading)
        return self._silent == len(self._loading)

    async def news(self, timeout_s: float) -> None:
        """Return when one of the last has ended, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        self._ended.clear()


class WeightLoading:
    """The newest publication, and what each process has loaded of it."""

    def __init__(
        self, roster: Roster, schedule: ScheduleSpec, supervision: SupervisionSpec
    ) -> None:
        self._roster = roster
        self._on_publish = schedule.on_publish
        self._heartbeat_s = supervision.heartbeat_s
        # Which samples share an engine step must not depend on timing in synchronous schedules.
        self._leaves_stragglers = not schedule.synchronous
        self._newest: Publication | None = None

    async def publish(self, publication: Publication, ask: Ask) -> dict[str, float]:
        """Have every member load the new weights, and return when they are proven on all but those
        that the run does not wait for: silent ones, and stragglers when generation is asynchronous.

        A member gets no group before it holds the weights; one that fails to prove their arrival is
        replaced. Returns the slowest member's seconds, in parts.
        """
        self._newest = publication
        loads = {m: self._start(m, ask) for m in self._roster.healthy()}
        await self._proven(loads)
        # From here on groups are admitted under this version: members with an older one get none
        self._roster.published = publication.version
        ended = [t for t in loads.values() if t.done() and not t.cancelled()]
        parts = [took for task in ended if (took := task.result())]
        return {k: max(p[k] for p in parts) for k in parts[0]} if parts else {}

    async def _proven(self, loads: Loads) -> None:
        began, waiting = now(), _Missing(loads)
        while True:
            if waiting.only_silent():
                return
            patience_s = None
            if waiting.half_at is not None:
                patience_s = STRAGGLER * (waiting.half_at - began) + self._heartbeat_s
            if self._leaves_stragglers and patience_s is not None and now() - began > patience_s:
                return
            # a member may fall silent meanwhile, which completes no task
            await waiting.news(RECHECK_S)

    async def catch_up(self, member: Member, ask: Ask) -> bool:
        """Load the newest weights into a new process, however often they change meanwhile; False if
        the process was lost."""
        process = member.process
        while not self._current(process):
            before = process.version
            await asyncio.wait([self._start(member, ask)])
            if member.process is not process or process.version == before:
                return False
        return member.process is process and member in self._roster.members

    def _current(self, process: Process) -> bool:
        return self._newest is None or process.version == self._newest.version

    def _start(self, member: Member, ask: Ask) -> asyncio.Task[dict[str, float]]:
        """A task that ends when the member's process has the newest weights, or is lost."""
        process = member.process
        if process.loading is None:
            process.loading = asyncio.create_task(self._load_newest(member, process, ask))
        return process.loading

    async def _load_newest(self, member: Member, process: Process, ask: Ask) -> dict[str, float]:
        """Seconds of the last load, in parts. Versions that were published while another one was
        being loaded are passed over."""
        took: dict[str, float] | None = {}
        try:
            while (newest := self._newest) is not None and process.version != newest.version:
                took = await ask(member, process, self._call(member, newest))
                if took is None:
                    return {}
                process.version = newest.version
            return took or {}
        finally:
            process.loading = None

    def _call(
        self, member: Member, publication: Publication
    ) -> Callable[[ActorClient], Awaitable[dict[str, float]]]:
        weights = member.pool.weights
        if weights is None:  # a frozen draft: the version alone is news to it
            return lambda client: client.set_version(publication.version)
        manifest, handle = publication.sets[weights]
        return lambda client: client.update_weights(manifest, handle, self._on_publish)
