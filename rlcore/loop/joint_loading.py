"""Delivers weights through a group transport: to all actors at once, while the learner waits.

Every actor stops between two steps first, and only those that did are sent the weights, so the loss
of an actor before that costs nothing: the learner forms the group anew from those that are there.
The loss of one while weights are being sent leaves others with half of them, and costs a recovery.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rlcore.errors import DeadlineExceeded, RoleLost, StageError
from rlcore.loop.clients import ActorClient, Publication
from rlcore.loop.loading import Ask
from rlcore.loop.members import Member, Process
from rlcore.loop.roster import Roster
from rlcore.types import POLICY, OnPublish

Send = Callable[[Publication, Sequence[ActorClient]], Awaitable[object]]  # LearnerClient.send
Party = tuple[Member, Process]

T = TypeVar("T")


class JointLoading:
    """Which processes take part in a publication, and what each has loaded."""

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
        """(who takes part, those of them that are new)."""
        joining, self._joining = self._joining, {}
        healthy = self._roster.healthy()
        # if all are silent, they are what there is
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
    """The answers of those whose call did not fail."""

    async def one(party: Party) -> tuple[Party, tuple[T] | None]:
        async def answered(client: ActorClient) -> tuple[T]:
            return (await call(client),)  # a call may return None

        return party, await ask(*party, answered)

    answers = await asyncio.gather(*(one(party) for party in parties))
    return {party: answer[0] for party, answer in answers if answer is not None}
