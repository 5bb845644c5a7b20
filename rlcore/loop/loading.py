"""Loads new weights into rollout actors: each at its own pace, or all in one joint transfer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from rlcore.errors import DeadlineExceeded, RoleLost, StageError
from rlcore.loop.members import Member, Process, Roster
from rlcore.loop.role_protocols import ActorClient, Publication
from rlcore.loop.specs import ScheduleSpec, SupervisionSpec
from rlcore.loop.timing import now
from rlcore.types import POLICY, OnPublish

# A member is a straggler when loading new weights takes this many times as long as half of the
# members took, and a heartbeat more
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
    """Members that are still loading; each end is noted once, and wakes the waiter only where its
    decision could change."""

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
        """Return whether all processes that are still loading are silent."""
        self._silent = sum(m.suspect for m in self._loading)
        return self._silent == len(self._loading)

    async def news(self, timeout_s: float) -> None:
        """Return when one of the last members has ended, or after `timeout_s`."""
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
        #: decoder layers that actors with rounded weights keep precise, by label
        self.precise_layers: Mapping[str, int] = {}

    async def publish(self, publication: Publication, ask: Ask) -> dict[str, float]:
        """Have every member load the new weights, and return when they are proven on all that the
        run waits for. It does not wait for silent ones, nor for stragglers when generation is
        asynchronous.

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
        """Load the newest weights; returns the seconds of the last load, in parts. Versions that
        were published while another was being loaded are skipped."""
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
        if weights is None:  # a frozen draft: only the version changes
            return lambda client: client.set_version(publication.version)
        manifest, handle = publication.sets[weights]
        layers = self.precise_layers.get(member.pool.label)
        if layers is not None:
            manifest = replace(manifest, precise_layers=layers)
        return lambda client: client.update_weights(manifest, handle, self._on_publish)


Send = Callable[[Publication, Sequence[ActorClient]], Awaitable[object]]  # LearnerClient.send
Party = tuple[Member, Process]


# Delivers weights through a group transport: to all actors at once, while the learner waits.
#
# Every actor stops between two steps first, and the weights are sent only to actors that stopped,
# so the loss of an actor before that costs nothing: the learner forms a new group of the remaining
# ones. The loss of an actor while weights are being sent leaves others with half of the weights,
# and costs a recovery.


class JointLoading:
    """The processes that take part in a publication, and the version that each has loaded."""

    def __init__(self, roster: Roster, on_publish: OnPublish) -> None:
        self._roster = roster
        self._on_publish = on_publish
        # new processes, which get their first weights with the next publication
        self._joining: dict[Member, tuple[Process, asyncio.Future[bool]]] = {}

    async def publish(self, publication: Publication, ask: Ask, send: Send) -> dict[str, float]:
        """Have the members stop, send them the new weights, and return when all have proven them.

        Silent members are left out; they get no group before they have taken part in a later
        publication. Returns the slowest member's seconds, in parts. Raises RoleLost if the weights
        did not reach all of those that had stopped for them.
        """
        version = publication.version
        manifest, _ = publication.sets[POLICY]
        parties, joining = self._parties()
        stopped = await _each(
            parties, ask, lambda client: client.prepare_weights(manifest, self._on_publish)
        )
        ready = [p for p in parties if p in stopped and _current(p)]
        parts: list[dict[str, float]] = []
        if ready:
            try:
                await send(publication, [process.client for _, process in ready])
            except (DeadlineExceeded, StageError) as e:
                raise RoleLost(f"version {version} was sent to actors in part: {e}") from e
            taken = await _each(ready, ask, lambda client: client.finish_weights(version))
            for _, process in taken:
                process.version = version
            parts = list(taken.values())
        # From here on groups are admitted under this version: members with an older one get none
        self._roster.published = version
        for member, (process, joined) in joining.items():
            if not joined.done():
                joined.set_result(process.version == version and member.process is process)
        return {k: max(p[k] for p in parts) for k in parts[0]} if parts else {}

    def _parties(self) -> tuple[list[Party], dict[Member, tuple[Process, asyncio.Future[bool]]]]:
        """(members that take part, the new ones among them)."""
        joining, self._joining = self._joining, {}
        healthy = self._roster.healthy()
        # if all are silent, there are no others
        members = [m for m in healthy if not m.suspect] or healthy
        new = [(m, process) for m, (process, _) in joining.items() if m.process is process]
        return [*((m, m.process) for m in members), *new], joining

    async def catch_up(self, member: Member) -> bool:
        """Have a new process take part in the next publication; False if it was lost by then."""
        joined: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._joining[member] = (member.process, joined)
        return await joined and member in self._roster.members


def _current(party: Party) -> bool:
    member, process = party
    return member.process is process


async def _each(
    parties: Sequence[Party], ask: Ask, call: Callable[[ActorClient], Awaitable[T]]
) -> dict[Party, T]:
    """The answers of the members whose calls did not fail."""

    async def one(party: Party) -> tuple[Party, tuple[T] | None]:
        async def answered(client: ActorClient) -> tuple[T]:
            return (await call(client),)  # a call may return None

        return party, await ask(*party, answered)

    answers = await asyncio.gather(*(one(party) for party in parties))
    return {party: answer[0] for party, answer in answers if answer is not None}
