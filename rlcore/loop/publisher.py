"""Delivers weights from the learner to the actors, one publication at a time, while the run
continues; with shared GPUs, learner and engines take turns around it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rlcore.errors import DeadlineExceeded
from rlcore.loop.fleet import Fleet
from rlcore.loop.role_protocols import ActorClient, Clients, LearnerClient, Publication, Sent
from rlcore.loop.run_plan import Plan, Progress
from rlcore.loop.timing import PUBLICATIONS, Timeline, now

# Engines and learner on the same GPUs, in turn (`schedule.colocated`).
#
#     engines generate -> they sleep -> the learner takes the steps of a phase -> it makes room ->
#     engines wake their weights, receive the new ones, wake their caches -> engines generate
#
# A phase ends with a publication, and nothing is drawn within one: so an engine that goes to sleep
# runs only copies of groups that another engine has finished, and holds them until it wakes. A lost
# engine is not replaced, since its GPU may be the learner's by then: the attempt ends, and the run
# goes on from its newest checkpoint.


class Colocation:
    """The turns of engines and learner. Engines are asleep when a session starts."""

    def __init__(self, learner: LearnerClient, fleet: Fleet, *, on: bool) -> None:
        self.on = on
        self._learner = learner
        self._fleet = fleet
        self._learners_turn = True
        self._costs: dict[str, float] = {}
        self._asleep_since: float | None = None

    async def to_learner(self) -> None:
        """Have all engines sleep, then the learner take its memory back."""
        if not self.on or self._learners_turn:
            return
        # also if it fails half-way: no engine may wake before the learner has freed its memory
        self._learners_turn = True
        took = await self._fleet.sleep()
        self._asleep_since = now()
        self._add("time/sleep_s", took.get("sleep_s", 0.0))
        self._costs["colocated/engine_freed_gib"] = took.get("freed_gib", 0.0)
        took = await self._learner.reclaim()
        self._add("time/learner_reclaim_s", took.get("reclaim_s", 0.0))

    async def from_learner(self) -> None:
        """Have the learner free its memory: engines are woken next, around a publication."""
        if not self.on:
            return
        took = await self._learner.release()
        self._add("time/learner_release_s", took.get("release_s", 0.0))
        self._costs["colocated/learner_freed_gib"] = took.get("freed_gib", 0.0)
        self._costs["colocated/learner_peak_gib"] = took.get("peak_gib", 0.0)
        self._learners_turn = False

    def awake(self, took: Mapping[str, float]) -> None:
        """Note that a publication has woken all engines, in these seconds."""
        if not self.on:
            return
        self._add("time/wake_s", took.get("wake_s", 0.0))
        if self._asleep_since is not None:
            self._add("time/asleep_s", now() - self._asleep_since)
        self._asleep_since = None

    def _add(self, name: str, value: float) -> None:
        self._costs[name] = self._costs.get(name, 0.0) + value

    def take_costs(self) -> dict[str, float]:
        """Metrics of the turns since the last call."""
        costs, self._costs = self._costs, {}
        return costs


class Publisher:
    """Gathers weights, sends them to the fleet, and records the version that every healthy actor
    has verified."""

    def __init__(
        self,
        plan: Plan,
        clients: Clients,
        fleet: Fleet,
        progress: Progress,
        timeline: Timeline,
        colocation: Colocation,
    ) -> None:
        self._plan = plan
        self._learner = clients.learner
        self._buffer = clients.buffer
        self._fleet = fleet
        self._progress = progress
        self._timeline = timeline
        self._colocation = colocation
        self._delivering: asyncio.Task[dict[str, float]] | None = None
        self._took: dict[str, float] = {}
        self._changed: float | None = None  # share of the newest publication

    async def begin(self, version: int, *, full: bool, resumed: str | None = None) -> None:
        """Gather the weights and start giving them to the actors; returns when the learner may
        continue. `full`, `resumed`: as in `LearnerClient.publish`."""
        await self.done()
        start = now()
        publication = await self._learner.publish(
            version, full=full or self._plan.verify_full, resumed=resumed
        )
        if not self._fleet.joined:
            self._note(publication.sent)
        self._delivering = asyncio.create_task(self._deliver(publication, start))
        if self._fleet.joined:  # what is sent is the learner's own memory
            await asyncio.wait([self._delivering])

    async def _deliver(self, publication: Publication, start: float) -> dict[str, float]:
        progress = self._progress
        newer = publication.version > progress.published >= 0  # not the first of a resumed run
        if self._plan.schedule.lag is not None and newer:
            await self._all_sampled()
        await self._colocation.from_learner()
        parts = await self._fleet.publish(publication, self._send)
        self._colocation.awake({"wake_s": parts.pop("wake_s", 0.0)})
        progress.published = publication.version
        await self._buffer.set_versions(progress.published, progress.step)
        self._timeline.add(PUBLICATIONS, f"version {publication.version}", start, now())
        named = {f"time/publish_{name}": seconds for name, seconds in parts.items()}
        return {"time/publish_s": now() - start, **named}

    async def _all_sampled(self) -> None:
        """With a fixed lag, wait until every group is sampled by the version that it was admitted
        at."""
        plan, left = self._plan, self._plan.schedule.wait_data_timeout_s
        beat = plan.supervision.heartbeat_s
        while not await self._buffer.wait_sampled(min(beat, left), plan.total_groups):
            left -= beat
            if left <= 0:
                raise DeadlineExceeded(
                    f"waited {plan.schedule.wait_data_timeout_s:g} s for the samples of version "
                    f"{self._progress.published} (schedule.wait_data_timeout_s)."
                )

    async def _send(self, publication: Publication, receivers: Sequence[ActorClient]) -> None:
        self._note(await self._learner.send(publication, receivers))

    def _note(self, sent: Sent) -> None:
        self._add({"publish/sent_mib": sent.mib})
        self._changed = sent.changed_share

    async def done(self) -> None:
        """Wait until the actors have verified the current publication. Raises the delivery's
        error."""
        if self._delivering is None:
            return
        self._add(await self._delivering)
        self._delivering = None

    def _add(self, took: Mapping[str, float]) -> None:
        for name, value in took.items():
            self._took[name] = self._took.get(name, 0.0) + value

    async def poll(self) -> None:
        """Finish the publication, as `done` does, if it was delivered already."""
        if self._delivering is not None and self._delivering.done():
            await self.done()

    def take_costs(self) -> dict[str, float]:
        """Seconds of the publications that ended since the last call, gathering included, and what
        those that began have sent, as metrics."""
        took, self._took = self._took, {}
        if self._changed is not None:
            took["publish/changed_share"] = self._changed
        self._changed = None
        return took

    async def cancel(self) -> None:
        """Abandon the current publication."""
        if self._delivering is not None:
            self._delivering.cancel()
            await asyncio.gather(self._delivering, return_exceptions=True)
