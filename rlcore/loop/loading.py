"""Loads new weights into rollout actors, each at its own pace."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

from rlcore.loop.clients import ActorClient, Publication
from rlcore.loop.members import Member, Process, Roster
from rlcore.loop.specs import ScheduleSpec, SupervisionSpec
from rlcore.loop.timing import now

# A member is a straggler when it takes so many times as long as half of the members took, and a
# heartbeat more, to load new weights
STRAGGLER = 2.0
RECHECK_S = 1.0

T = TypeVar("T")
Loads = Mapping[Member, "asyncio.Task[dict[str, float]]"]


class Ask(Protocol):
    """`Supervisor.ask`: a call to a member's process; None if that failed."""

    async def __call__(
        self, member: Member, process: Process, call: Callable[[ActorClient], Awaitable[T]]
    ) -> T | None: ...


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
        began = now()
        half_s: float | None = None  # until half of the members had the weights
        while True:
            missing = {m: t for m, t in loads.items() if not t.done()}
            awaited = [t for m, t in missing.items() if not m.suspect]
            if not awaited:
                return
            if half_s is None and 2 * len(missing) <= len(loads):
                half_s = now() - began
            patience_s = None if half_s is None else STRAGGLER * half_s + self._heartbeat_s
            if self._leaves_stragglers and patience_s is not None and now() - began > patience_s:
                return
            # a member may fall silent meanwhile, which completes no task
            await asyncio.wait(awaited, timeout=RECHECK_S, return_when=asyncio.FIRST_COMPLETED)

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
