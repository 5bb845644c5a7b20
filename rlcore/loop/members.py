"""The rollout actors as the loop sees them: pools of one kind, members by name, their processes."""

from __future__ import annotations

import asyncio
import heapq
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

from rlcore.loop.role_protocols import ActorClient, Spawn
from rlcore.loop.timing import HeartbeatSpans
from rlcore.types import POLICY, Request

Purpose = Literal["all", "training", "evaluation"]
Held = dict[int, list[Request]]  # group id -> requests of it

# Work that a member may do: training groups, evaluation groups of no particular pool, and
# evaluation groups of one pool, which have its place.
TRAINING, EVALUATION = -1, 0
_IDS = 1 << 40  # evaluation groups of one place


def evaluation_id(number: int, place: int = EVALUATION) -> int:
    """The id of an evaluation group: negative, by its number from 0 and its pool's place."""
    return -1 - number - place * _IDS


def work_of(group_id: int) -> int:
    """TRAINING, EVALUATION, or the place of the pool that an evaluation group is for."""
    return TRAINING if group_id >= 0 else (-1 - group_id) // _IDS


@dataclass(frozen=True, slots=True)
class ActorPool:
    """Actors of one kind. Example: ActorPool("fp8", spawn, count=2)"""

    label: str  # of the configuration: actor.<label>
    spawn: Spawn
    count: int  # at the start
    purpose: Purpose = "all"  # what its members are given: evaluation, everything else, or both
    # the set of a publication that its members load; None: their own weights are frozen
    weights: str | None = POLICY
    place: int = 0  # among the pools of its run, from 1; 0: it is given no evaluations by name


class CallQueue:
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
        """Drop queued calls and stop waiting for calls that were made."""
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
    work: CallQueue = field(default_factory=CallQueue)  # submissions and withdrawals
    loading: asyncio.Task[dict[str, float]] | None = None  # on its way to the newest weights
    checking: asyncio.Task[None] | None = None  # a heartbeat that was asked for
    asked_at: float = 0.0  # when that was
    beats: HeartbeatSpans = field(default_factory=HeartbeatSpans)

    def close(self) -> None:
        """Stop waiting for this process."""
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
        """Return whether a group may be assigned to this member."""
        return self.does(work_of(group_id))

    def does(self, work: int) -> bool:
        """Return whether a member is given some work: see `work_of`."""
        if work > EVALUATION:
            return work == self.pool.place
        purpose = self.pool.purpose
        return purpose == "all" or (purpose == "evaluation") == (work == EVALUATION)


@dataclass(slots=True)
class Reassignments:
    """Groups to assign once more, by the reason."""

    lost: Held = field(default_factory=dict)  # of actors that failed: counted as a loss
    idle: Held = field(default_factory=dict)  # there was no actor to give them to
    # of silent actors, which go on with them if they can: assigned to another beside
    delayed: Held = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.lost or self.idle or self.delayed)

    def split(self, keep: Callable[[int], bool]) -> tuple[Reassignments, Reassignments]:
        """(the groups whose id satisfies `keep`, the rest)."""
        kept, rest = Reassignments(), Reassignments()
        for name in ("lost", "idle", "delayed"):
            for group_id, requests in getattr(self, name).items():
                getattr(kept if keep(group_id) else rest, name)[group_id] = requests
        return kept, rest

    def requests(self, group_id: int) -> list[Request]:
        """All requests that a group waits with."""
        return [r for held in (self.lost, self.idle, self.delayed) for r in held.get(group_id, ())]

    def drop(self, group_ids: Iterable[int]) -> None:
        """Forget these groups."""
        for group_id in group_ids:
            for held in (self.lost, self.idle, self.delayed):
                held.pop(group_id, None)


SPARE = 4  # a heap is made anew when it has so many times as many entries as there are members
Entry = tuple[int, int]  # (load, number of the member)
# the least loaded member for a group id, of some labels or, without any, of all
Choose = Callable[[int, Sequence[str]], Member | None]


# Who works on what: the groups of each member, the members of each group, and which member has
# least to do.
#
# Every change costs O(log n) in the number of members, however many groups there are.


class Workload:
    """Heaps of members by load, one for each kind of work. An entry counts as long as its load is
    the member's; each change of a load adds one."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}  # by number
        self._numbers = count()
        self._holders: dict[int, list[Member]] = {}  # group id -> members that work on it
        # by work and, of training, label; "": of any
        self._heaps: defaultdict[tuple[int, str], list[Entry]] = defaultdict(list)

    def add(self, member: Member) -> None:
        """Add a member, which comes after the others where loads are equal."""
        member.number = next(self._numbers)
        self._members[member.number] = member
        self._push(member)

    def remove(self, member: Member) -> None:
        """Remove a member, which must hold no group (`take_all`)."""
        self._members.pop(member.number, None)

    def give(self, member: Member, group_id: int, requests: list[Request]) -> None:
        """Note that a member works on these requests of a group that it had no part of."""
        member.groups[group_id] = requests
        member.load += len(requests)
        self._holders.setdefault(group_id, []).append(member)
        self._push(member)

    def take(self, member: Member, group_id: int) -> list[Request]:
        """Note that a member does not work on a group any more; returns its requests of the
        group."""
        requests = member.groups.pop(group_id)
        member.load -= len(requests)
        holders = self._holders[group_id]
        holders.remove(member)
        if not holders:
            del self._holders[group_id]
        self._push(member)
        return requests

    def take_all(self, member: Member) -> Held:
        """Take all groups of a member."""
        return {group_id: self.take(member, group_id) for group_id in list(member.groups)}

    def holders(self, group_id: int) -> list[Member]:
        """The members that work on a group, in their order."""
        return sorted(self._holders.get(group_id, ()), key=lambda m: m.number)

    def held(self) -> list[int]:
        """Ids of the groups that some member works on."""
        return list(self._holders)

    @contextmanager
    def choosing(self, able: Callable[[Member], bool]) -> Iterator[Choose]:
        """A function that gives the least loaded of the `able` members that serve a group, have one
        of some labels and do not hold it. Ties go by order; None if there is none.

        The able members must not change meanwhile: the others are passed over once, not for every
        group.
        """
        aside: list[tuple[list[Entry], Entry]] = []

        def least(group_id: int, label: str) -> Member | None:
            heap, holding = self._heaps[work_of(group_id), label], []
            found = None
            while heap and found is None:
                load, number = heap[0]
                member = self._members.get(number)
                if member is None or member.load != load:
                    heapq.heappop(heap)
                elif not able(member):
                    aside.append((heap, heapq.heappop(heap)))
                elif group_id in member.groups:
                    holding.append(heapq.heappop(heap))
                else:
                    found = member
            for entry in holding:
                heapq.heappush(heap, entry)
            return found

        def choose(group_id: int, labels: Sequence[str] = ()) -> Member | None:
            found = [least(group_id, label) for label in labels or ("",)]
            free = [member for member in found if member is not None]
            return min(free, key=lambda m: (m.load, m.number), default=None)

        try:
            yield choose
        finally:
            for heap, entry in aside:
                heapq.heappush(heap, entry)

    def _push(self, member: Member) -> None:
        if member.number not in self._members:
            return
        works = {(work, "") for work in (TRAINING, EVALUATION, member.pool.place)}
        for work, label in works | {(TRAINING, member.pool.label)}:
            if not member.does(work):
                continue
            heap = self._heaps[work, label]
            heapq.heappush(heap, (member.load, member.number))
            if len(heap) > SPARE * len(self._members) + SPARE:
                all_ = self._members.values()
                able = [m for m in all_ if m.does(work) and label in ("", m.pool.label)]
                heap[:] = [(m.load, m.number) for m in able]
                heapq.heapify(heap)


class Roster:
    """All members in the order in which they came, and the groups without one."""

    def __init__(self, pools: Sequence[ActorPool]) -> None:
        self.pools = {p.label: replace(p, place=i) for i, p in enumerate(pools, 1)}
        self.members: list[Member] = []
        self.work = Workload()
        self.waiting = Reassignments()
        self.published = -1  # the version that every member of the rotation serves, at least
        self._named = dict.fromkeys(self.pools, 0)

    def add(self, member: Member) -> None:
        """Add a member."""
        self.members.append(member)
        self.work.add(member)

    def remove(self, member: Member) -> None:
        """Remove a member for good."""
        self.members.remove(member)
        self.work.remove(member)

    def in_rotation(self, member: Member) -> bool:
        """Return whether a member may be given work. A member with weights older than the version
        noted as published may not: groups are admitted under that version."""
        return member.healthy and not member.suspect and member.process.version >= self.published

    def rotation(self) -> list[Member]:
        """The members that may be given work."""
        return [m for m in self.members if self.in_rotation(m)]

    def healthy(self) -> list[Member]:
        """The members whose process runs, silent ones and those with older weights included."""
        return [m for m in self.members if m.healthy]

    def of(self, label: str) -> list[Member]:
        """The members of one pool."""
        return [m for m in self.members if m.pool.label == label]

    def new_name(self, label: str) -> str:
        """A name that no member of the run has had."""
        number = self._named[label]
        self._named[label] += 1
        return f"{label}-{number}"
