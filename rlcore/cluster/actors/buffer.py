"""The replay buffer's process. No Ray in here, so that a simulation can host it too."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.buffer import ReplayBuffer, journal, store
from rlcore.buffer.journal import NO_SHARDS, RecordFile, ShardFiles, Written
from rlcore.buffer.shard import PAUSE_S, ShardReply, ShardReport
from rlcore.buffer.store import lose_shard
from rlcore.errors import StageError
from rlcore.loop.role_protocols import Batch, Missing
from rlcore.serialization import StoredEpisode, StoredGroup
from rlcore.types import Score


class BufferActor:
    """The replay buffer behind an event loop: every method runs alone, waits are long polls with a
    deadline."""

    def __init__(
        self,
        shards: ShardFiles = NO_SHARDS,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """`settle`: called when the process has its initial objects, before another process waits
        for it."""
        self._polls: list[Waiter] = []
        self._files = shards
        self._settle = settle
        self._cut: journal.BufferSnapshot | None = None  # of a checkpoint that is to be written
        self._saving = False  # shards keep what a checkpoint that is being written contains
        self._written: Written | None = None  # the newest checkpoint's records
        self._shards: set[str] = set()  # names of those that have called
        self._refused = ""  # why the buffer did not take what it was sent

    async def start(self, buffer: ReplayBuffer) -> int:
        self.buffer = buffer
        self._settle()
        return os.getpid()

    async def alive(self) -> bool:
        """Raises StageError if the buffer has refused a message: its senders do not wait for an
        answer."""
        if self._refused:
            raise StageError(self._refused)
        return True

    # ---- from rollout actors and graders ---------------------------------------------------------

    async def add_records(self, records: Sequence[bytes]) -> None:
        """Serialised training trajectories."""
        await self._take_in(lambda: self.buffer.add_records(records))

    async def add_scores(self, scores: Sequence[Score]) -> None:
        """Scores of training episodes."""
        await self._take_in(lambda: self.buffer.add_scores(scores))

    async def add_report(self, shard: str, report: ShardReport) -> ShardReply:
        """Apply a shard's report on the samples of its node. Returns the samples that it may drop
        now, and how long it is to wait before its next call."""
        self._shards.add(shard)
        await self._take_in(lambda: self.buffer.add_report(report))
        return ShardReply(await self.released(shard), PAUSE_S * len(self._shards))

    async def released(self, shard: str) -> list[int]:
        """Keys of records that a shard may drop, once each."""
        return [] if self._saving else self.buffer.live.take_released(shard)

    async def _take_in(self, add: Callable[[], None]) -> None:
        try:
            add()
        except ValueError as e:
            self._refused = self._refused or f"the replay buffer refused a message: {e}"
            raise
        self._notify()

    # ---- from the loop ---------------------------------------------------------------------------

    async def set_versions(self, published: int, learner: int) -> None:
        self.buffer.set_versions(published=published, learner=learner)
        self._notify()

    async def limit_staleness(self, bound: int) -> None:
        self.buffer.batches.limit(bound)
        self._notify()

    async def wait_room(self, timeout_s: float, *, all_done: bool, total: int) -> int:
        return int(
            await self._poll(lambda: self.buffer.room(total=total, all_done=all_done), timeout_s)
        )

    async def wait_sampled(self, timeout_s: float, total: int) -> bool:
        return bool(await self._poll(lambda: self.buffer.sampled(total=total), timeout_s))

    async def wait_ready(self, step: int, timeout_s: float, wave: int | None) -> bool:
        return bool(await self._poll(lambda: self.buffer.ready(step, wave=wave), timeout_s))

    async def admit(self, prompt_ids: Sequence[str]) -> list[int]:
        return self.buffer.admit(prompt_ids)

    async def take(self, step: int) -> Batch:
        batch = self.buffer.take(step)
        self._notify()
        return Batch(batch.groups, batch.metrics)

    async def commit(self, step: int) -> None:
        self.buffer.commit(step)
        self._notify()

    async def give_up(self, reason: str) -> int:
        count = self.buffer.give_up(reason)
        self._notify()
        return count

    async def in_flight(self, group_ids: Sequence[int] | None = None) -> Missing:
        return self.buffer.in_flight(group_ids)

    async def landed(self) -> list[int]:
        return self.buffer.live.take_landed()

    async def lost(self, group_ids: Sequence[int], limit: int) -> tuple[Missing, dict[int, str]]:
        again, given_up = self.buffer.lost(group_ids, limit)
        if given_up:
            self._notify()
        return again, given_up

    async def shard_lost(self, shard: str) -> Missing:
        """Account for the loss of a shard; returns the samples to request again."""
        written = self._written
        recover = (lambda *sample: None) if written is None else written.read
        self._shards.discard(shard)
        again = lose_shard(self.buffer, shard, recover)
        self._notify()
        return again

    async def waiting_for(self, step: int) -> str:
        return store.waiting_for(self.buffer, step)

    async def outcomes(self) -> list[tuple[str, float]]:
        return self.buffer.intake.take_outcomes()

    async def failed_scores(self) -> tuple[int, int, str]:
        return store.failed_scores(self.buffer)

    async def metrics(self) -> dict[str, float]:
        return store.metrics(self.buffer)

    # ---- from learner ranks and for display ------------------------------------------------------

    async def stored(
        self, step: int, group_ids: list[int], timeout_s: float = 0.0
    ) -> list[StoredGroup] | None:
        """Groups of a batch that was taken, for a learner rank. Waits for groups that are being
        sampled again; None when the time is over."""
        whole = await self._poll(lambda: self.buffer.whole(step, group_ids), timeout_s)
        return self.buffer.stored(step, group_ids) if whole else None

    async def peek(self, step: int, count: int) -> list[StoredEpisode]:
        """Some samples of a batch."""
        return self.buffer.peek(step, count)

    # ---- checkpoints -----------------------------------------------------------------------------

    async def snapshot(self) -> None:
        self._cut = journal.cut(self.buffer)
        self._saving = True

    async def save(self, folder: str, *, timeout_s: float) -> None:
        """Write the snapshot in a thread, while other calls are served. The deadline is for the
        shards."""
        cut, self._cut = self._cut, None
        if cut is None:
            raise StageError("the buffer was asked to save without a snapshot")

        def write(shared: Path, keys: Mapping[str, Sequence[int]]) -> Mapping[str, str]:
            return self._files.write(shared, keys, timeout_s)

        try:
            written = await asyncio.to_thread(journal.save, folder, cut, write)
        finally:
            self._saving = self._cut is not None
        self._keep(written)

    async def load(self, folder: str, shards: list[str], timeout_s: float) -> None:
        """Continue from what `save` wrote. `shards`: names of the present shards, for which the
        deadline is."""

        def read(
            shared: Path, files: Mapping[str, Sequence[RecordFile]]
        ) -> Mapping[str, Sequence[int]]:
            return self._files.read(shared, files, timeout_s)

        loaded = await asyncio.to_thread(journal.read, folder, shards, read)
        journal.restore(self.buffer, loaded.snapshot)
        self._keep(loaded.written)
        del loaded
        self._settle()
        self._notify()

    def _keep(self, written: Written) -> None:
        if self._written is not None:
            self._written.close()
        self._written = written

    # ---- waiting ---------------------------------------------------------------------------------

    def _notify(self) -> None:
        """Wake the waiters whose condition is true now. Conditions are checked here, since waking a
        waiter in vain would cost more."""
        for waiting in self._polls:
            if not waiting.woken.done() and _is_worth_a_look(waiting.value):
                waiting.woken.set_result(None)

    async def _poll(self, value: Callable[[], Any], timeout_s: float) -> Any:
        """Wait for a true value of `value`; returns it, or the last value when the time is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not (current := value()):
            if loop.time() >= deadline:
                return current
            waiting = Waiter(value, loop.create_future())
            self._polls.append(waiting)
            try:
                await asyncio.wait([waiting.woken], timeout=deadline - loop.time())
            finally:
                self._polls.remove(waiting)
        return current


@dataclass(eq=False, slots=True)
class Waiter:
    """A long poll."""

    value: Callable[[], Any]
    woken: asyncio.Future[None]


def _is_worth_a_look(value: Callable[[], Any]) -> bool:
    """Return whether a value is true or raises when computed."""
    try:
        return bool(value())
    except Exception:  # the waiter computes the value again, which raises the error
        return True
