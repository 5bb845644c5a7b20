"""The replay buffer's process."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlcore.errors import StageError
from rlcore.types import Group, Trajectory

Missing = dict[int, tuple[str, tuple[int, ...]]]  # group id -> (prompt id, indices of samples that have not arrived)


class BufferShell:
    """The replay buffer behind an event loop: every method runs alone, waits are long polls with a deadline."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._snapshot: Any = None
        self._taken: dict[int, dict[int, Group]] = {}  # step -> its groups, decoded once for all ranks

    async def start(self, options: dict[str, Any]) -> int:
        from rlcore.buffer.store import ReplayBuffer

        self.buffer = ReplayBuffer(**options)
        return os.getpid()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Scored training trajectories from the scorer."""
        self.buffer.add(trajectories)
        await self._notify()

    async def alive(self) -> bool:
        return True

    async def set_versions(self, published: int, learner: int) -> None:
        self.buffer.set_versions(published=published, learner=learner)
        await self._notify()

    async def wait_room(self, timeout_s: float, all_done: bool, total: int) -> int:
        """Groups that may be admitted now, `total` over the whole run; waits up to `timeout_s` for there to be some.

        `all_done` asks that nothing is in flight first: synchronous schedules admit in whole waves, so that which
        samples share an engine step never depends on timing.
        """

        return int(await self._poll(lambda: self._room(all_done, total), timeout_s))

    def _room(self, all_done: bool, total: int) -> int:
        buffer, ledger = self.buffer, self.buffer.ledger
        if all_done and buffer.reissue():
            return 0
        return max(0, min(buffer.room(buffer.published), total - ledger.consumed - len(ledger.live)))

    async def wait_ready(self, step: int, timeout_s: float, wave: int | None) -> bool:
        """True as soon as the batch of `step`, the next one, can be taken.

        `wave`: the groups of the whole run, in synchronous schedules: everything that may be admitted has to be there
        first, so that a phase cut short by the end of a plan begins as a whole one does.
        """

        def ready() -> bool:
            if wave is not None and (self.buffer.reissue() or self._room(False, wave)):
                return False
            return self.buffer.ready(step)

        return bool(await self._poll(ready, timeout_s))

    async def _poll(self, value: Callable[[], Any], timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        async with self._changed:
            while not (now := value()):
                left = deadline - time.monotonic()
                if left <= 0:
                    return now
                try:
                    await asyncio.wait_for(self._changed.wait(), left)
                except TimeoutError:
                    return value()
            return now

    async def admit(self, prompt_ids: list[str]) -> list[int]:
        return self.buffer.admit(prompt_ids, self.buffer.published)

    async def take(self, step: int) -> tuple[list[tuple[int, int]], dict[str, float]]:
        """(group id, response tokens) of the batch for `step`, and the batch's statistics."""
        groups = self.buffer.take(step)
        if groups is None:
            raise StageError(f"the batch of step {step} was asked for before it was ready")
        self._taken[step] = {g.group_id: g for g in groups}
        await self._notify()
        return [(g.group_id, g.tokens) for g in groups], self.buffer.batch_metrics(step)

    async def payload(self, step: int, group_ids: list[int]) -> list[Group]:
        """Taken groups, for a learner rank."""
        return [self._taken[step][g] for g in group_ids]

    async def commit(self, step: int) -> None:
        """The batch of `step` was trained on."""
        self.buffer.commit(step)
        del self._taken[step]
        await self._notify()

    async def in_flight(self) -> Missing:
        """group id -> (prompt id, sample indices not arrived yet) of the incomplete groups."""
        return {m.group_id: (m.prompt_id, m.sample_indices) for m in self.buffer.reissue()}

    async def lost(self, group_ids: list[int], limit: int) -> tuple[Missing, dict[int, str]]:
        """Note that these were lost: what is to be handed out again, and those given up, with their prompt ids."""
        prompts = {m.group_id: m.prompt_id for m in self.buffer.reissue(group_ids)}
        given_up = {g: prompts[g] for g in self.buffer.lost(group_ids, limit)}
        if given_up:
            await self._notify()
        again = {m.group_id: (m.prompt_id, m.sample_indices) for m in self.buffer.reissue(group_ids)}
        return again, given_up

    async def waiting_for(self, step: int) -> str:
        return self.buffer.waiting_for(step)

    async def failed_scores(self) -> tuple[int, str]:
        return self.buffer.failed_scores()

    async def metrics(self) -> dict[str, float]:
        """Counts for a metrics row; also checks that every account matches."""
        self.buffer.check()
        return self.buffer.metrics()

    async def samples(self, step: int, n: int) -> list[Trajectory]:
        return self.buffer.peek(step, n)

    async def snapshot(self) -> None:
        """Fix what `save` will write, by reference."""
        self._snapshot = self.buffer.snapshot()

    async def save(self, folder: str) -> None:
        """Write the snapshot, beside whatever else is asked."""
        from rlcore.buffer.journal import save

        snapshot, self._snapshot = self._snapshot, None
        await asyncio.to_thread(save, folder, snapshot)

    async def load(self, folder: str) -> None:
        from rlcore.buffer.journal import load

        load(folder, self.buffer)
        await self._notify()
