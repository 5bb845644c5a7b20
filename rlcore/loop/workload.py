"""Who works on what: the groups of each member, the members of each group, and who has least to do.

Every change costs O(log n) in the number of members, however many groups there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from rlcore.loop.members import Held, Member
from rlcore.types import Request

SPARE = 4  # a heap is made anew when it has so many times as many entries as there are members

Entry = tuple[int, int]  # (load, number of the member)
Choose = Callable[[int], Member | None]  # the least loaded member for a group id


class Workload:
    """Heaps of members by load, one for training groups and one for evaluation. An entry counts as
    long as its load is the member's; each change of a load adds one."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}  # by number
        self._numbers = count()
        self._holders: dict[int, list[Member]] = {}  # group id -> members that work on it
        self._heaps: dict[bool, list[Entry]] = {False: [], True: []}  # by: for evaluation

    def add(self, member: Member) -> None:
        """A further member, which comes after the others where loads are equal."""
        member.number = next(self._numbers)
        self._members[member.number] = member
        self._push(member)

    def remove(self, member: Member) -> None:
        """A member leaves; it must hold nothing afterwards (`take_all`)."""
        self._members.pop(member.number, None)

    def give(self, member: Member, group_id: int, requests: list[Request]) -> None:
        """A member works on these requests of a group, of which it has none."""
        member.groups[group_id] = requests
        member.load += len(requests)
        self._holders.setdefault(group_id, []).append(member)
        self._push(member)

    def take(self, member: Member, group_id: int) -> list[Request]:
        """A member does not work on a group any more; the requests that it had of it."""
        requests = member.groups.pop(group_id)
        member.load -= len(requests)
        holders = self._holders[group_id]
        holders.remove(member)
        if not holders:
            del self._holders[group_id]
        self._push(member)
        return requests

    def take_all(self, member: Member) -> Held:
        """All that a member had."""
        return {group_id: self.take(member, group_id) for group_id in list(member.groups)}

    def holders(self, group_id: int) -> list[Member]:
        """The members that work on a group, in their order."""
        return sorted(self._holders.get(group_id, ()), key=lambda m: m.number)

    def held(self) -> list[int]:
        """Ids of the groups that some member works on."""
        return list(self._holders)

    @contextmanager
    def choosing(self, able: Callable[[Member], bool]) -> Iterator[Choose]:
        """A function that gives the least loaded of the `able` members that serve a group and do
        not hold it, ties by order; None if there is none.

        Who is able must not change meanwhile: the others are looked at once, not for every group.
        """
        aside: list[tuple[list[Entry], Entry]] = []

        def choose(group_id: int) -> Member | None:
            heap, holding = self._heaps[group_id < 0], []
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

        try:
            yield choose
        finally:
            for heap, entry in aside:
                heapq.heappush(heap, entry)

    def _push(self, member: Member) -> None:
        if member.number not in self._members:
            return
        for evaluation, heap in self._heaps.items():
            if not member.serves(-1 if evaluation else 0):
                continue
            heapq.heappush(heap, (member.load, member.number))
            if len(heap) > SPARE * len(self._members) + SPARE:
                serving = [m for m in self._members.values() if m.serves(-1 if evaluation else 0)]
                heap[:] = [(m.load, m.number) for m in serving]
                heapq.heapify(heap)
