"""Keeps the rollout actors busy: admits prompts while the staleness bound allows it, and resizes
the fleet on request."""

from __future__ import annotations

import asyncio

from rlcore.errors import UserError
from rlcore.loop.clients import BufferClient
from rlcore.loop.in_flight import GroupsInFlight
from rlcore.loop.parts import Parts
from rlcore.loop.plan import Plan


class Dispatcher:
    """Admits prompts and watches the fleet; `groups` are those on their way."""

    def __init__(self, plan: Plan, buffer: BufferClient, parts: Parts) -> None:
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
        self.groups = GroupsInFlight(plan.request_timeout_s, buffer, parts)
        self._note_failures_at = 1  # number of failed scores at which the next message is due

    async def admit(self) -> None:
        """Admit prompts wherever the bound leaves room, until cancelled."""
        while True:
            await self.gate.wait()
            await self._room(self._plan.supervision.heartbeat_s)
            async with self.admitting:
                if not self.gate.is_set():
                    continue
                await self.groups.look()  # who has finished what decides who gets more
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
        with the last reason."""
        failed, sentence = await self._buffer.failed_scores()
        if failed >= self._note_failures_at:
            self._note(sentence)
            while self._note_failures_at <= failed:
                self._note_failures_at *= 10
