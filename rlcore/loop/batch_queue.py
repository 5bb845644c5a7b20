"""The batches of an update phase, gathered while the one before trains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlcore.errors import DeadlineExceeded
from rlcore.loop.role_protocols import Batch, Clients
from rlcore.loop.run_plan import Plan
from rlcore.loop.timing import now

Batches = dict[int, Batch]  # by step


class BatchQueue:
    """Takes the batches of one update phase at a time and has the learner fetch them."""

    def __init__(self, plan: Plan, clients: Clients, stopping: Callable[[], bool]) -> None:
        """`stopping`: whether the run is stopping, which ends all waits."""
        self._plan = plan
        self._buffer = clients.buffer
        self._learner = clients.learner
        self._stopping = stopping
        self._next_phase: asyncio.Task[Batches | None] | None = None
        self._fetching: asyncio.Task[None] | None = None

    def prepare(self, steps: Sequence[int]) -> None:
        """Start gathering the batches of these steps, unless that was begun."""
        if self._next_phase is None:
            self._next_phase = asyncio.create_task(self._gather(steps))

    async def get(self, steps: Sequence[int]) -> Batches | None:
        """The batches of these steps, fetched by the learner; None if the run was stopped first.

        Raises DeadlineExceeded, naming what is missing, when they take too long.
        """
        self.prepare(steps)
        limit, gathering = self._plan.schedule.wait_data_timeout_s, self._next_phase
        assert gathering is not None
        await asyncio.wait([gathering], timeout=limit)
        if not gathering.done():
            lacking = await self._buffer.waiting_for(steps[-1])
            raise DeadlineExceeded(
                f"waited {limit:g} s for a batch (schedule.wait_data_timeout_s): {lacking}."
            )
        self._next_phase = None
        return gathering.result()

    async def _gather(self, steps: Sequence[int]) -> Batches | None:
        plan = self._plan
        wave = plan.total_groups if plan.synchronous else None
        batches: Batches = {}
        for step in steps:
            while not await self._buffer.wait_ready(step, plan.supervision.heartbeat_s, wave):
                if self._stopping():
                    return None
            batches[step] = await self._buffer.take(step)
        # the steps of later epochs take these again
        once = steps[: plan.phases.batches]
        begun = now()
        self._fetching = asyncio.create_task(self._fetch({s: batches[s] for s in once}))
        try:
            await self._fetching
        finally:
            self._fetching = None
        metrics = {**batches[steps[0]].metrics, "time/fetch_s": now() - begun}
        return {**batches, steps[0]: replace(batches[steps[0]], metrics=metrics)}

    async def _fetch(self, batches: Batches) -> None:
        await self._learner.fetch(batches)

    async def settle(self) -> None:
        """Stop gathering; batches that the learner is fetching arrive first, since they must not
        vanish while it does."""
        if self._fetching is not None:
            await asyncio.wait([self._fetching])
        await self.cancel()

    async def cancel(self) -> None:
        """Stop gathering."""
        if self._next_phase is not None:
            self._next_phase.cancel()
            await asyncio.gather(self._next_phase, return_exceptions=True)
            self._next_phase = None
