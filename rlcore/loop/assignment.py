"""The assignment of groups to rollout actors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rlcore.loop.members import Held, Member, Process, Reassignments, Roster
from rlcore.loop.shares import KindShares
from rlcore.loop.supervision import Supervisor
from rlcore.loop.timing import ITEMS, in_turns
from rlcore.types import PageRule, Request

Given = tuple[int, list[Request]]  # group id, its requests
Chosen = dict[Member, list[Given]]

TOKENS_A_TIMEOUT = 1024  # rollout.request_timeout_s is what a request of so many tokens may take
OPEN_REQUESTS_S = 10.0  # an actor that takes longer to name its open requests is not waited for


class Assignments:
    """Assigns whole groups to the least loaded members. Never waits for a member: submissions and
    aborts are queued, in order."""

    def __init__(self, roster: Roster, supervisor: Supervisor) -> None:
        self.cut_requests = 0  # that were moved to another member with their tokens
        self._roster = roster
        self._supervisor = supervisor
        self._moving: set[int] = set()
        self.kinds: KindShares | None = None  # who draws which sample; None: anybody
        #: the pages that requests are sent with, by label of sparse actors
        self.page_rules: Mapping[str, PageRule] = {}

    def assign(self, groups: Held, *, beside: bool = False) -> None:
        """Assign groups to the least loaded members of the rotation, ties by order, one message a
        member.

        Groups that are already assigned are withdrawn first, unless they are given to another
        member `beside`. Without a member that could take them they wait. A member that fails to
        accept its work is replaced; an engine that refuses a request ends the run with its
        UserError at the next `Supervisor.watch`.
        """
        if not beside:
            self.withdraw(groups)
        chosen: Chosen = {}
        self._choose(sorted(groups.items()), chosen, beside=beside)
        for member, given in chosen.items():
            self._submit_given(member, given)

    async def assign_in_turns(self, groups: Held) -> None:
        """Assign many groups, in several turns of the loop and with one message a member: which
        samples share an engine step must not depend on turns."""
        self.withdraw(groups)
        chosen: Chosen = {}
        ordered = sorted(groups.items())
        for at in range(0, len(ordered), ITEMS):
            self._choose(ordered[at : at + ITEMS], chosen, beside=False)
            await asyncio.sleep(0)
        async for member, given in in_turns(chosen.items()):
            self._submit_given(member, given)

    def _choose(self, groups: Sequence[Given], chosen: Chosen, *, beside: bool) -> None:
        work, waiting = self._roster.work, self._roster.waiting
        parts = [(g, *part) for g, requests in groups for part in self._by_kind(g, requests)]
        with work.choosing(self._roster.in_rotation) as least_loaded:
            for group_id, labels, requests in parts:
                member = least_loaded(group_id, labels)
                if member is None:
                    wait = waiting.delayed if beside else waiting.idle
                    wait[group_id] = [*wait.get(group_id, ()), *requests]
                    continue
                rule = self.page_rules.get(member.pool.label)
                if rule is not None:
                    requests = [replace(r, page_rule=rule) for r in requests]
                work.give(member, group_id, requests)
                self._moving.discard(group_id)
                chosen.setdefault(member, []).append((group_id, requests))

    def _by_kind(
        self, group_id: int, requests: list[Request]
    ) -> list[tuple[tuple[str, ...], list[Request]]]:
        """The requests of a group by the labels that may draw them; () for all, where no actor of
        these labels is left."""
        if self.kinds is None or group_id < 0:
            return [((), requests)]
        there = {member.pool.label for member in self._roster.members}
        parts: dict[tuple[str, ...], list[Request]] = {}
        for request in requests:
            labels = self.kinds.of(group_id, request.sample_index)
            parts.setdefault(tuple(n for n in labels if n in there), []).append(request)
        return list(parts.items())

    def _submit_given(self, member: Member, given: Sequence[Given]) -> None:
        """Submit to a member the requests that were not withdrawn since it was chosen."""
        held = member.groups
        batch = [r for g, requests in given if held.get(g) is requests for r in requests]
        if batch:
            self._submit(member, batch)

    def withdraw(self, group_ids: Iterable[int]) -> None:
        """Forget these groups, and have members abort their running requests of them."""
        ids, work = list(group_ids), self._roster.work
        self._roster.waiting.drop(ids)
        taken: dict[Member, list[str]] = {}
        for group_id in ids:
            for member in work.holders(group_id):
                requests = work.take(member, group_id)
                taken.setdefault(member, []).extend(r.request_id for r in requests)
        for member in sorted(taken, key=lambda m: m.number):
            if member.healthy:
                self._abort(member, taken[member])

    def withdraw_evaluation(self) -> None:
        """Withdraw every group of an evaluation, as `withdraw` does."""
        waiting = self._roster.waiting
        held = [*waiting.lost, *waiting.idle, *waiting.delayed, *self._roster.work.held()]
        self.withdraw({g for g in held if g < 0})

    def _submit(self, member: Member, batch: list[Request], begun: Any = None) -> None:
        process, ask = member.process, self._supervisor.ask
        process.work.put(lambda: ask(member, process, lambda client: client.submit(batch, begun)))

    def _abort(self, member: Member, ids: list[str]) -> None:
        process, ask = member.process, self._supervisor.ask
        process.work.put(lambda: ask(member, process, lambda client: client.abort(ids)))

    def take_waiting(self) -> Reassignments:
        """Groups without a member that one could take now; each is returned once."""
        if not self._roster.waiting:
            return Reassignments()
        rotation, waiting = self._roster.rotation(), self._roster.waiting

        def could(group_id: int) -> bool:
            able = [m for m in rotation if m.serves(group_id) and group_id not in m.groups]
            labels = {member.pool.label for member in able}
            requests = waiting.requests(group_id)
            parts = [own for own, _ in self._by_kind(group_id, requests)]
            return bool(able) and all(not own or labels & {*own} for own in parts)

        taken, self._roster.waiting = waiting.split(could)
        return taken

    def assign_waiting(self, waiting: Reassignments) -> None:
        """Assign waiting groups with their waiting requests."""
        self.assign(waiting.lost | waiting.idle)
        self.assign(waiting.delayed, beside=True)

    def overrunning(self, request_timeout_s: float) -> list[int]:
        """Training groups with a request that exceeds its decoding time, where another member of
        the same pool could continue it. Time in a queue does not count."""
        found = set()
        for member in self._roster.members:
            for group_id in _slow(member, request_timeout_s):
                alone = len(self._roster.work.holders(group_id)) == 1
                free = alone and group_id not in self._moving
                if free and group_id >= 0 and self._successors(member, group_id):
                    found.add(group_id)
        return sorted(found)

    def _successors(self, member: Member, group_id: int) -> list[Member]:
        """Members that could continue a member's responses: of its kind, and with weights at least
        as new, since versions within a response never decrease."""
        return [
            m
            for m in self._roster.rotation()
            if m is not member
            and m.pool is member.pool
            and m.process.version >= member.process.version
            and group_id not in m.groups
        ]

    def move(self, group_ids: Iterable[int]) -> None:
        """Have the least loaded other members continue these groups, from their present tokens.
        Counts `cut_requests`."""
        for group_id in group_ids:
            for member in self._roster.work.holders(group_id)[:1]:
                self._moving.add(group_id)
                member.process.work.put(partial(self._move, member, member.process, group_id))

    async def _move(self, member: Member, process: Process, group_id: int) -> None:
        requests = member.groups.get(group_id)
        if requests is None:
            return
        ids = [r.request_id for r in requests]
        cut = await self._supervisor.ask(member, process, lambda client: client.cut(ids))
        # it has failed, or the group was withdrawn meanwhile
        if cut is None or member.groups.get(group_id) is not requests:
            return
        self._moving.discard(group_id)
        open_ids, begun = cut
        left = [r for r in requests if r.request_id in open_ids]
        if not left:
            return  # all have finished and are on their way
        self.cut_requests += len(left)
        self._roster.work.take(member, group_id)
        # no successor is left: the member continues them itself
        able = self._successors(member, group_id) or [member]
        successor = min(able, key=lambda m: m.load)
        self._roster.work.give(successor, group_id, left)
        self._submit(successor, left, begun)

    async def open_requests(self) -> set[str]:
        """Ids of the requests that members are still working on, as far as they answer."""
        asked = [asyncio.create_task(self._open(m)) for m in self._roster.healthy()]
        if not asked:
            return set()
        done, silent = await asyncio.wait(asked, timeout=OPEN_REQUESTS_S)
        for task in silent:
            task.cancel()
        return {request_id for task in done for request_id in task.result()}

    async def _open(self, member: Member) -> list[str]:
        ask = self._supervisor.ask
        return await ask(member, member.process, lambda client: client.open_requests()) or []


def _slow(member: Member, request_timeout_s: float) -> set[int]:
    """Groups of a member with a request that exceeds its decoding time."""
    found = set()
    for name, seconds in member.process.status.get("decoding_s", {}).items():
        if seconds <= request_timeout_s:
            continue
        group_id = int(name.rsplit(":", 2)[1])
        for request in member.groups.get(group_id, ()):
            if request.request_id == name and seconds > allowed_s(request, request_timeout_s):
                found.add(group_id)
    return found


def allowed_s(request: Request, request_timeout_s: float) -> float:
    """Seconds of decoding that a request may take, in proportion to its tokens beyond
    TOKENS_A_TIMEOUT."""
    return request_timeout_s * max(1.0, request.sampling.max_new_tokens / TOKENS_A_TIMEOUT)
