"""Keeps the rollout actors busy: admits prompts while the staleness bound allows it, follows their
groups through losses and deadlines, and resizes the fleet on request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcore.errors import StageError, UserError
from rlcore.interfaces import Reporter
from rlcore.loop.members import Held
from rlcore.loop.role_protocols import BufferClient, Missing
from rlcore.loop.run_plan import Plan, Progress
from rlcore.loop.shares import KindShares
from rlcore.loop.timing import in_turns, now
from rlcore.types import request_id

if TYPE_CHECKING:
    from rlcore.loop.evaluation import Evaluator
    from rlcore.loop.fleet import Fleet
    from rlcore.loop.prompts import RequestMaker
    from rlcore.loop.saver import Saver

ADMITTED = 512  # prompts that are admitted in one call of the buffer
LOSSES = 3  # losses of one group (dead, hung or late actors) after which it fails


@dataclass(frozen=True, slots=True)
class LoopParts:
    """The controller's parts. `scale_requests`: the actor counts requested by `rlcore scale`
    since the last call, by label; None: no request; UserError: one that cannot be read.
    `scale_answer` is given the reason why it was refused, or ""."""

    fleet: Fleet
    requests: RequestMaker
    evaluator: Evaluator
    saver: Saver
    reporter: Reporter
    scale_requests: Callable[[], dict[str, int] | None] = lambda: None
    scale_answer: Callable[[str], None] = lambda refused: None


class GroupsInFlight:
    """Assigns admitted groups to the fleet, and reassigns those that actors or graders lost."""

    def __init__(
        self, plan: Plan, buffer: BufferClient, parts: LoopParts, progress: Progress
    ) -> None:
        self._timeout_s = plan.request_timeout_s
        self._progress = progress
        self.kinds = KindShares(
            parts.fleet.training_sizes(),
            plan.shares,
            mixed=plan.mixed_groups,
            state=progress.kinds,
        )
        self._buffer = buffer
        self._assignments = parts.fleet.assignments
        self._assignments.kinds = self.kinds
        self._requests = parts.requests
        self._evaluator = parts.evaluator
        self._note = parts.reporter.note
        self._due: dict[int, float] = {}  # group id -> when it is looked for, unless it is whole
        self._idle: set[int] = set()  # of these some sample was with no actor at the last look
        # held from what the buffer says of groups until they are assigned or withdrawn: else one
        # could land between the two and be followed without end
        self._asking = asyncio.Lock()

    @property
    def cut_requests(self) -> int:
        """Requests that took longer than rollout.request_timeout_s allows and were moved."""
        return self._assignments.cut_requests

    async def assign(self, groups: Missing) -> None:
        """Ask the fleet for these samples of these groups."""
        requests = await self._asked_of(groups)
        self._due.update(dict.fromkeys(groups, now() + self._timeout_s))
        await self._assignments.assign_in_turns(requests)

    async def admit(self, room: int) -> None:
        """Admit up to `room` of the next prompts, as many as the buffer takes now, and assign
        them. No other task may advance the prompts meanwhile."""
        prompts, asked = self._requests.prompts, self._requests.asked
        admitted: Missing = {}
        async with self._asking:
            while len(admitted) < room:
                ahead = [i.prompt_id for i in prompts.peek(min(ADMITTED, room - len(admitted)))]
                ids = await self._buffer.admit(ahead)
                prompts.advance(len(ids))
                for group_id, prompt_id in zip(ids, ahead):
                    samples = asked(prompt_id).samples
                    admitted[group_id] = (prompt_id, tuple(range(samples)))
                    self.kinds.admit(group_id, samples, self._progress.step)
                if len(ids) < len(ahead):
                    break
            await self.assign(admitted)

    async def _asked_of(self, groups: Missing) -> Held:
        return {
            g: [r for r in self._requests.group(g, prompt_id) if r.sample_index in samples]
            async for g, (prompt_id, samples) in in_turns(groups.items())
        }

    async def resume(self) -> None:
        """Assign the groups that were in flight at the checkpoint, and list them."""
        in_flight = await self._buffer.in_flight()
        if in_flight:
            self._note(
                f"{len(in_flight)} groups were in flight at the checkpoint: assigned again "
                f"({spans(in_flight)})"
            )
            await self.assign(in_flight)

    async def look(self) -> None:
        """Withdraw groups from the actors that are not in flight any more: finished, evicted or
        given up."""
        async with self._asking:
            left = self._due.keys() & set(await self._buffer.landed())
            for group_id in left:
                del self._due[group_id]
            self._idle -= left
            self.kinds.forget(left)
            self._assignments.withdraw(sorted(left))

    async def reissue_waiting(self) -> None:
        """Assign the groups of failed and of silent actors again."""
        assignments = self._assignments
        training, evaluation = assignments.take_waiting().split(lambda g: g >= 0)
        # evaluations have their own deadline and no ledger entry
        assignments.assign_waiting(evaluation)
        if training.lost:
            await self._assign_again(list(training.lost), "were held by lost actors")
        if not training.idle and not training.delayed:
            return
        async with self._asking:
            in_flight = await self._buffer.in_flight([*training.idle, *training.delayed])
            await self.assign({g: in_flight[g] for g in training.idle if g in in_flight})
            delayed = {g: in_flight[g] for g in training.delayed if g in in_flight}
            assignments.assign(await self._asked_of(delayed), beside=True)

    async def reissue_vanished(self) -> None:
        """Reassign groups that an actor or the graders lost without an error: samples that no actor
        works on and that have not arrived rollout.request_timeout_s later."""
        due = [g for g, at in self._due.items() if at < now()]
        if not due:
            await self.look()
            return
        still_open = await self._assignments.open_requests()
        await self.look()  # afterwards: a sample may finish between the two
        in_flight = await self._buffer.in_flight(due)
        due = [g for g in due if g in in_flight and g in self._due]
        idle = {g for g in due if not self._all_open(g, in_flight[g][1], still_open)}
        vanished = sorted(idle & self._idle)
        self._due.update(dict.fromkeys(due, now() + self._timeout_s))
        self._idle = (self._idle - set(due)) | (idle - set(vanished))
        if vanished:
            await self._assign_again(vanished, "missed rollout.request_timeout_s")

    @staticmethod
    def _all_open(group_id: int, samples: tuple[int, ...], still_open: set[str]) -> bool:
        return all(request_id("train", group_id, i) in still_open for i in samples)

    async def help_slow(self) -> None:
        """Requests that have decoded for too long are moved to another actor with their tokens. No
        sample is drawn twice: the shorter of two draws would come first, which would make long
        answers rarer than under the policy."""
        assignments = self._assignments
        slow = assignments.overrunning(self._timeout_s)
        if not slow:
            return
        in_flight = await self._buffer.in_flight(slow)
        groups = [g for g in slow if g in in_flight]
        self._note(
            f"{len(groups)} groups have decoded for longer than rollout.request_timeout_s="
            f"{self._timeout_s:g} allows: other actors go on with them ({spans(groups)})"
        )
        assignments.move(groups)

    async def _assign_again(self, group_ids: list[int], what: str) -> None:
        """Count a loss of these groups and assign them again, or let them fail: a prompt that
        crashes every actor must not reach all of them."""
        async with self._asking:
            again, given_up = await self._buffer.lost(group_ids, LOSSES)
            if again:
                self._note(f"{len(again)} groups {what}: assigned again ({spans(again)})")
                await self.assign(again)
        if given_up:
            named = ", ".join(f"{g} ({prompt_id})" for g, prompt_id in given_up.items())
            self._note(f"{len(given_up)} groups {what}, {LOSSES} times by now: given up ({named})")
            self._assignments.withdraw(given_up)

    async def reissue_unscored(self) -> None:
        """A graders' process died with its queued answers: request every sample again that no actor
        is still sampling."""
        before = await self._buffer.in_flight()
        still_open = await self._assignments.open_requests()
        idle = [
            g for g, (_, samples) in before.items() if not self._all_open(g, samples, still_open)
        ]
        async with self._asking:
            # missing samples from before the actors were asked, of groups that are still in flight
            in_flight = await self._buffer.in_flight(idle)
            lost = {g: before[g] for g in idle if g in in_flight}
            self._note(
                f"a graders' process died with its queue: {len(lost)} groups are assigned again"
            )
            await self.assign(lost)
        self._evaluator.again()

    async def reissue_stored(self, shard: str) -> None:
        """A node is lost with the records of finished samples: request these again."""
        async with self._asking:
            lost = await self._buffer.shard_lost(shard)
            self._note(
                f"the records that {shard} kept are lost: {len(lost)} groups are sampled again"
                + (f" ({spans(lost)})" if lost else "")
            )
            await self.assign(lost)


def spans(numbers: Iterable[int]) -> str:
    """The numbers in short: "3-5, 9"."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


class Dispatcher:
    """Admits prompts and watches the fleet; `groups` are the groups in flight."""

    def __init__(
        self, plan: Plan, buffer: BufferClient, parts: LoopParts, progress: Progress
    ) -> None:
        self._plan = plan
        self._buffer = buffer
        self._fleet = parts.fleet
        self._requests = parts.requests
        self._note = parts.reporter.note
        self._show_fleet = parts.reporter.fleet
        self._scale_requests = parts.scale_requests
        self._scale_answer = parts.scale_answer
        # synchronous schedules: open while generation, and only generation, may start
        self.gate = asyncio.Event()
        # held while admitting, so that a checkpoint contains all of an admission or none
        self.admitting = asyncio.Lock()
        self.groups = GroupsInFlight(plan, buffer, parts, progress)
        self._note_failures_at = 1  # number of failed scores at which the next message is due

    async def admit(self) -> None:
        """Admit prompts whenever the bound allows it, until cancelled."""
        while True:
            await self.gate.wait()
            await self._room(self._plan.supervision.heartbeat_s)
            async with self.admitting:
                if not self.gate.is_set():
                    continue
                await self.groups.look()  # finished work decides which member gets more
                await self._admit(await self._room(0.0))

    async def _room(self, wait_s: float) -> int:
        plan = self._plan
        return await self._buffer.wait_room(
            wait_s, all_done=plan.synchronous, total=plan.total_groups
        )

    async def _admit(self, room: int) -> None:
        """Admit up to `room` of the next prompts: as many as fit when the buffer is asked."""
        if not room:
            return
        prompts = self._requests.prompts
        if prompts.remembers:
            prompts.observe(await self._buffer.outcomes())
        await self.groups.admit(room)

    async def watch_fleet(self) -> None:
        """Heartbeats of the rollout actors, the number asked for, and the work of those that
        failed, until cancelled."""
        supervisor = self._fleet.supervisor
        while True:
            await supervisor.news(self._plan.supervision.heartbeat_s)
            self._resize()
            await supervisor.watch()
            self._show_fleet(self._fleet.states())
            await self.note_failed_scores()
            await self.groups.reissue_waiting()
            await self.groups.reissue_vanished()
            await self.groups.help_slow()

    def _resize(self) -> None:
        try:
            wanted = self._scale_requests()
            if wanted is None:
                return
            self._fleet.resize(wanted)
        except UserError as e:
            self._note(f"rlcore scale was refused: {e}")
            self._scale_answer(str(e))
        else:
            self._scale_answer("")

    async def note_failed_scores(self) -> None:
        """Note the first sample that could not be scored, and then each tenfold number of them,
        with the last reason. Raises StageError where the run's first samples fail for one
        reason."""
        failed, alike, sentence = await self._buffer.failed_scores()
        if 0 < self._plan.supervision.first_failures <= alike:
            raise StageError(
                f"no sample could be scored, and the first {alike} failed alike: {sentence}; "
                "correct this, or set supervision.first_failures=0 to go on all the same"
            )
        if failed >= self._note_failures_at:
            self._note(sentence)
            while self._note_failures_at <= failed:
                self._note_failures_at *= 10
