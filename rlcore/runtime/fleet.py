"""The rollout actors: who holds which group, who is well, and what happens when one is not.

A sick actor (dead, hung past its deadline, or with weights that did not arrive) leaves the rotation at once, is
replaced, gets the newest published weights, and the groups it held are handed out again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from rlcore.errors import DeadlineExceeded, StageError
from rlcore.runtime.cluster import ActorDied, call
from rlcore.types import OnPublish, Request, WeightManifest


@dataclass(slots=True)
class Member:
    """One rollout actor as the controller sees it."""

    name: str  # "<label>-<index>", stays when the process is replaced
    spawn: Callable[[str], tuple[Any, Any]]  # actor name -> (handle of a new process, reference to its start)
    handle: Any
    version: int = -1  # last version whose arrival was proven
    groups: dict[int, list[Request]] = field(default_factory=dict)  # group id -> requests it was given
    status: dict[str, Any] = field(default_factory=dict)
    restarts: int = 0
    well: bool = True

    @property
    def load(self) -> int:
        """Requests handed to it whose group has not completed."""
        return sum(len(r) for r in self.groups.values())


@dataclass(frozen=True, slots=True)
class Publication:
    """The newest published weights: kept so that a replacement can be given them."""

    manifest: WeightManifest
    handle: Any


class Fleet:
    """Assignment, publishing and supervision of rollout actors. Holds references and counts, no payloads."""

    def __init__(
        self,
        members: Sequence[Member],
        *,
        on_publish: OnPublish,
        publish_timeout_s: float,
        hang_timeout_s: float,
        start_timeout_s: float,
        max_restarts: int,
        log: Callable[[str], None],
    ) -> None:
        self.members = list(members)
        self.on_publish: OnPublish = on_publish
        self.publish_timeout_s, self.hang_timeout_s = publish_timeout_s, hang_timeout_s
        self.start_timeout_s, self.max_restarts = start_timeout_s, max_restarts
        self.publication: Publication | None = None
        self.replacements = 0
        self._log = log

    def rotation(self) -> list[Member]:
        """The members that may be given work."""
        return [m for m in self.members if m.well]

    async def assign(self, groups: dict[int, list[Request]]) -> None:
        """Hand groups to the least loaded healthy members: whole groups, ties by order, one message a member.

        Raises UserError when an engine refuses a request; a member that does not answer is replaced.
        """
        await self._someone()
        batches: dict[int, list[Request]] = {}
        for group_id, requests in sorted(groups.items()):
            member = min(self.rotation(), key=lambda m: m.load)
            member.groups[group_id] = requests
            batches.setdefault(self.members.index(member), []).extend(requests)
        await asyncio.gather(*(self._submit(self.members[i], requests) for i, requests in batches.items()))

    async def _someone(self) -> None:
        """Wait until a member is in the rotation: a lone actor may be being replaced."""
        deadline = time.monotonic() + self.start_timeout_s
        while not self.rotation():
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"waited {self.start_timeout_s:g} s for a rollout actor to be well (cluster.start_timeout_s)."
                )
            await asyncio.sleep(0.1)

    async def _submit(self, member: Member, requests: list[Request]) -> None:
        try:
            await call(
                member.handle.submit.remote(requests),
                timeout_s=self.hang_timeout_s,
                what=f"{member.name} to take {len(requests)} requests",
                key="cluster.hang_timeout_s",
            )
        except (ActorDied, DeadlineExceeded, StageError) as e:
            await self.replace(member, str(e))

    def forget(self, live: set[int]) -> None:
        """Drop finished groups from the books; `live` are the incomplete ones (evaluation groups are negative)."""
        for m in self.members:
            m.groups = {g: r for g, r in m.groups.items() if g in live or g < 0}

    def forget_evaluation(self) -> None:
        for m in self.members:
            m.groups = {g: r for g, r in m.groups.items() if g >= 0}

    async def publish(self, publication: Publication) -> dict[str, float]:
        """Give every member the new weights at once; a member that fails to prove arrival is replaced.

        Returns the slowest member's seconds, in parts.
        """
        self.publication = publication
        results = await asyncio.gather(*(self._publish_to(m) for m in self.rotation()))
        if not any(results):
            raise StageError(f"no rollout actor could load version {publication.manifest.version}")
        parts = [r for r in results if r]
        return {k: max(p[k] for p in parts) for k in parts[0]}

    async def _publish_to(self, member: Member) -> dict[str, float] | None:
        assert self.publication is not None
        p = self.publication
        try:
            took = await call(
                member.handle.update_weights.remote(
                    p.manifest, p.handle, self.on_publish, self.publish_timeout_s
                ),
                timeout_s=self.publish_timeout_s,
                what=f"{member.name} to load version {p.manifest.version}",
                key="schedule.publish_timeout_s",
            )
        except (ActorDied, DeadlineExceeded, StageError) as e:
            await self.replace(member, str(e))
            return None
        member.version = p.manifest.version
        return took

    async def replace(self, member: Member, why: str) -> None:
        """Kill a sick member's process, start another under the same name, give it weights and its groups back."""
        if not member.well:
            return
        member.well = False
        self.replacements += 1
        member.restarts += 1
        self._log(f"{member.name} is replaced: {why.splitlines()[0][:200]}")
        if self.replacements > self.max_restarts:
            raise StageError(
                f"rollout actors failed {self.replacements} times (cluster.max_restarts={self.max_restarts}); last: {why}"
            )
        ray.kill(member.handle, no_restart=True)
        member.handle, started = member.spawn(member.name)
        await call(
            started,
            timeout_s=self.start_timeout_s,
            what=f"{member.name} to start again",
            key="cluster.start_timeout_s",
        )
        member.status = {}
        member.well = True
        if self.publication is not None:
            await self._publish_to(member)
        held = [r for requests in member.groups.values() for r in requests]
        if held and member.well:
            await self._submit(member, held)

    async def watch(self) -> None:
        """One round of heartbeats."""
        await asyncio.gather(*(self._check(m) for m in self.rotation()))

    async def _check(self, member: Member) -> None:
        try:
            status = await call(
                member.handle.status.remote(),
                timeout_s=self.hang_timeout_s,
                what=f"a heartbeat of {member.name}",
                key="cluster.hang_timeout_s",
            )
        except (ActorDied, DeadlineExceeded, StageError) as e:
            await self.replace(member, str(e))
            return
        member.status = status
        if status["error"]:
            await self.replace(member, status["error"])
        elif status["heartbeat_age_s"] > self.hang_timeout_s:
            await self.replace(member, f"its engine thread stood still for {self.hang_timeout_s:g} s")
