"""Engines and learner on the same GPUs, in turn (`schedule.colocated`).

    engines generate -> they sleep -> the learner takes the steps of a phase -> it makes room ->
    engines wake their weights, receive the new ones, wake their caches -> engines generate

A phase ends with a publication, and nothing is drawn within one: so nothing runs on an engine that
goes to sleep but copies of groups that another one has finished, which it holds until it wakes. An
engine that is lost is not replaced, for its GPU may be the learner's by then: the attempt ends, and
the run goes on from its newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlcore.loop.clients import LearnerClient
from rlcore.loop.fleet import Fleet
from rlcore.loop.timing import now


class Colocation:
    """Whose turn it is. Engines are asleep when a session starts."""

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
        # also if it fails half-way: no engine may be woken before the learner has made room
        self._learners_turn = True
        took = await self._fleet.sleep()
        self._asleep_since = now()
        self._add("time/sleep_s", took.get("sleep_s", 0.0))
        self._costs["colocated/engine_freed_gib"] = took.get("freed_gib", 0.0)
        took = await self._learner.reclaim()
        self._add("time/learner_reclaim_s", took.get("reclaim_s", 0.0))

    async def from_learner(self) -> None:
        """Have the learner make room: engines are woken next, around a publication."""
        if not self.on:
            return
        took = await self._learner.release()
        self._add("time/learner_release_s", took.get("release_s", 0.0))
        self._costs["colocated/learner_freed_gib"] = took.get("freed_gib", 0.0)
        self._costs["colocated/learner_peak_gib"] = took.get("peak_gib", 0.0)
        self._learners_turn = False

    def awake(self, took: Mapping[str, float]) -> None:
        """A publication has woken all engines, in these seconds."""
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
