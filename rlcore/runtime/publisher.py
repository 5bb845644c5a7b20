"""Weights on their way from the learner to the actors, one publication at a time, while the run goes on."""

from __future__ import annotations

import asyncio
import time

from rlcore.runtime.buffer_client import BufferClient
from rlcore.runtime.fleet import Fleet, Publication
from rlcore.runtime.learners import Learners
from rlcore.runtime.plan import Plan, Progress


class Publisher:
    """Gathers weights, gives them to the fleet and notes the version that is proven on every healthy actor."""

    def __init__(self, plan: Plan, learners: Learners, fleet: Fleet, buffer: BufferClient, progress: Progress) -> None:
        self._plan, self._learners, self._fleet, self._buffer = plan, learners, fleet, buffer
        self._progress = progress
        self._delivering: asyncio.Task[dict[str, float]] | None = None
        self._took: dict[str, float] = {}

    async def begin(self, version: int, *, full: bool, resumed: str | None = None) -> None:
        """Gather the weights and start giving them to the actors; returns when the learner may go on."""
        await self.done()
        plan, start = self._plan, time.monotonic()
        publication = await self._learners.publish(
            version,
            plan.wire_dtype,
            full or plan.verify_full,
            plan.run_seed,
            resumed=resumed,
            sparse_copy=plan.sparse_copy,
        )
        self._delivering = asyncio.create_task(self._deliver(publication, start))

    async def _deliver(self, publication: Publication, start: float) -> dict[str, float]:
        progress = self._progress
        parts = await self._fleet.publish(publication)
        progress.published = publication.manifest.version
        await self._buffer.call("set_versions", progress.published, progress.step, what="a version to be noted")
        return {"time/publish_s": time.monotonic() - start, **{f"time/publish_{k}": v for k, v in parts.items()}}

    async def done(self) -> None:
        """Wait until the actors have proven what was begun. Raises what the delivery raised."""
        if self._delivering is not None:
            for name, seconds in (await self._delivering).items():
                self._took[name] = self._took.get(name, 0.0) + seconds
            self._delivering = None

    async def poll(self) -> None:
        """The same if they have already, else nothing."""
        if self._delivering is not None and self._delivering.done():
            await self.done()

    def take_seconds(self) -> dict[str, float]:
        """Seconds of the publications that ended since the last call, gathering included, as metrics."""
        took, self._took = self._took, {}
        return took

    async def cancel(self) -> None:
        """Give up what is on its way."""
        if self._delivering is not None:
            self._delivering.cancel()
            await asyncio.gather(self._delivering, return_exceptions=True)
