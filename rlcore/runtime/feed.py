"""Keeping the rollout actors at work: new prompts where the bound leaves room, and whatever was lost once more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from rlcore.errors import UserError
from rlcore.runtime.buffer_client import BufferClient, Missing
from rlcore.runtime.evaluation import Evaluator
from rlcore.runtime.fleet import Fleet
from rlcore.runtime.plan import Plan
from rlcore.runtime.prompts import PromptSource
from rlcore.runtime.requests import RequestMaker

LOSSES = 3  # of one group, to dead, hung or late actors, after which it is given up


class Feed:
    """Hands groups out to the fleet, first by admission, then again when an actor or the scorer lost them."""

    def __init__(
        self,
        plan: Plan,
        *,
        fleet: Fleet,
        buffer: BufferClient,
        prompts: PromptSource,
        requests: RequestMaker,
        evaluator: Evaluator,
        note: Callable[[str], None],
        wanted_actors: Callable[[], dict[str, int] | None],
    ) -> None:
        self._plan, self._fleet, self._buffer = plan, fleet, buffer
        self._prompts, self._requests, self._evaluator = prompts, requests, evaluator
        self._note, self._wanted_actors = note, wanted_actors
        self.gate = asyncio.Event()  # synchronous schedules: open while generation, and only generation, may start
        self.admitting = asyncio.Lock()  # an admission is whole or not at all in a checkpoint
        self._live: dict[int, float] = {}  # group id -> deadline of its arrival (monotonic)
        self._told_at = 1  # failed scores at which they are told of next

    async def admit(self) -> None:
        """Admit prompts wherever the bound leaves room, for ever."""
        plan = self._plan
        while True:
            await self.gate.wait()
            await self._room(plan.heartbeat_s)
            async with self.admitting:
                if not self.gate.is_set():
                    continue
                await self._reissue_overdue()
                room = await self._room(0.0)
                if room:
                    items = [self._prompts.next() for _ in range(room)]
                    prompt_ids = [i.prompt_id for i in items]
                    ids = await self._buffer.call("admit", prompt_ids, what="an admission")
                    everything = tuple(range(self._requests.samples))
                    await self._hand_out({g: (p, everything) for g, p in zip(ids, prompt_ids)})

    async def _room(self, wait_s: float) -> int:
        plan = self._plan
        arguments = (wait_s, plan.synchronous, plan.total_groups)
        return int(await self._buffer.call("wait_room", *arguments, what="room in the buffer"))

    async def _hand_out(self, groups: Missing) -> None:
        """Ask the fleet for these samples of these groups."""
        deadline = time.monotonic() + self._plan.request_timeout_s
        self._live.update(dict.fromkeys(groups, deadline))
        await self._fleet.assign(
            {
                g: [r for r in self._requests.group(g, prompt_id) if r.sample_index in samples]
                for g, (prompt_id, samples) in groups.items()
            }
        )

    async def resume(self) -> None:
        """Hand out what was in flight at the checkpoint that the run goes on from, and name it."""
        in_flight = await self._buffer.in_flight()
        if in_flight:
            named = spans(in_flight)
            self._note(f"{len(in_flight)} groups were in flight at the checkpoint: handed out again ({named})")
            await self._hand_out(in_flight)

    async def _reissue_overdue(self) -> None:
        """Groups that an actor or the scorer lost without a word are handed out again; nothing waits for ever."""
        in_flight = await self._buffer.in_flight()
        self._live = {g: d for g, d in self._live.items() if g in in_flight}
        self._fleet.forget(set(self._live))
        overdue = [g for g, d in self._live.items() if d < time.monotonic()]
        if overdue:
            await self._hand_out_again(overdue, "missed rollout.request_timeout_s")

    async def _hand_out_again(self, group_ids: list[int], what: str) -> None:
        """Groups that were lost, which is counted: a prompt that ends every actor it meets must not meet them all."""
        again, given_up = await self._buffer.call("lost", group_ids, LOSSES, what="lost groups to be noted")
        if again:
            self._note(f"{len(again)} groups {what}: handed out again ({spans(again)})")
            await self._hand_out(again)
        if given_up:
            named = ", ".join(f"{g} ({prompt_id})" for g, prompt_id in given_up.items())
            self._note(f"{len(given_up)} groups {what}, {LOSSES} times by now: given up ({named})")

    async def watch_fleet(self) -> None:
        """Heartbeats of the rollout actors, the size asked for, and what sick ones left undone, for ever."""
        while True:
            await self._fleet.news(self._plan.heartbeat_s)
            wanted = self._wanted_actors()
            if wanted is not None:
                try:
                    self._fleet.resize(wanted)
                except UserError as e:
                    self._note(f"rlcore scale was refused: {e}")
            await self._fleet.watch()
            await self.tell_failed_scores()
            lost = self._fleet.take_lost()
            if lost:
                await self._hand_out_again([g for g in lost if g >= 0], "were held by lost actors")
                await self._fleet.assign({g: requests for g, requests in lost.items() if g < 0})  # evaluation

    async def tell_failed_scores(self) -> None:
        """The first sample that could not be scored, and then each tenfold number of them, with the last reason."""
        failed, sentence = await self._buffer.call("failed_scores", what="the number of failed scores")
        if failed >= self._told_at:
            self._note(sentence)
            while self._told_at <= failed:
                self._told_at *= 10

    async def reissue_unscored(self) -> None:
        """The graders' process died with what waited in it: what no actor is still sampling is asked for again."""
        in_flight, still_open = await self._buffer.in_flight(), await self._fleet.open_requests()
        lost = {}
        for group_id, (prompt_id, samples) in in_flight.items():
            gone = tuple(i for i in samples if f"train:{group_id}:{i}" not in still_open)
            if gone:
                lost[group_id] = (prompt_id, samples)
        self._note(f"the graders' process died and was restarted: {len(lost)} groups are handed out again")
        await self._hand_out(lost)
        await self._evaluator.again()


def spans(numbers: Iterable[int]) -> str:
    """All of them, briefly: "3-5, 9"."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
