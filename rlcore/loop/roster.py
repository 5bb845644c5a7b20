"""All members of a fleet, what they work on, and what waits for one."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.loop.members import ActorPool, Member, Waiting
from rlcore.loop.workload import Workload


class Roster:
    """All members in the order in which they came, and the groups that wait for one."""

    def __init__(self, pools: Sequence[ActorPool]) -> None:
        self.pools = {pool.label: pool for pool in pools}
        self.members: list[Member] = []
        self.work = Workload()
        self.waiting = Waiting()
        self.published = -1  # the version that every member of the rotation serves, at least
        self._named = dict.fromkeys(self.pools, 0)

    def add(self, member: Member) -> None:
        """A further member."""
        self.members.append(member)
        self.work.add(member)

    def remove(self, member: Member) -> None:
        """A member leaves for good."""
        self.members.remove(member)
        self.work.remove(member)

    def in_rotation(self, member: Member) -> bool:
        """Whether a member may be given work. One whose weights are older than the version noted as
        published may not: groups are admitted under that version."""
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
