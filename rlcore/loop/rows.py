"""The row of each step: what learner, buffer and fleet have to say of it, with times and rates."""

from __future__ import annotations

from collections.abc import Mapping

from rlcore.interfaces import Reporter
from rlcore.loop.clients import BufferClient
from rlcore.loop.fleet import Fleet
from rlcore.loop.plan import Progress
from rlcore.loop.timeline import Timeline
from rlcore.loop.timing import Clocks, now


class RowWriter:
    """Writes one row a step. Counts of a resumed run go on from its checkpoint's."""

    def __init__(
        self,
        buffer: BufferClient,
        fleet: Fleet,
        progress: Progress,
        reporter: Reporter,
        timeline: Timeline,
    ) -> None:
        self._buffer = buffer
        self._fleet = fleet
        self._progress = progress
        self._reporter = reporter
        self._timeline = timeline
        self._arrived_tokens = 0.0
        self._row_at = 0.0  # when the last row was written, or the time of the first one began

    async def begin(self) -> None:
        """The time of the first row begins."""
        counts = await self._buffer.metrics()
        self._arrived_tokens = counts["buffer/arrived_tokens"]
        self._fleet.take_busy_s()
        self._row_at = now()
        self._timeline.begin(self._progress.seconds)

    async def write(
        self, metrics: Mapping[str, float], clocks: Clocks, others: Mapping[str, float]
    ) -> None:
        """Report the step just taken. `metrics`: the learner's, the batch's and an evaluation's.
        `others`: of publications that ended and of dispatch."""
        progress, at = self._progress, now()
        step_s, self._row_at = at - self._row_at, at
        progress.seconds += step_s
        counts = await self._buffer.metrics()
        arrived = counts["buffer/arrived_tokens"]
        learn_s = clocks.parts.get("learn", 0.0) + clocks.parts.get("begin", 0.0)
        row = {
            "step": progress.step,
            "policy_version": progress.step,
            **metrics,
            **counts,
            "time/rollout_s": self._fleet.take_busy_s(),
            "time/publish_s": 0.0,
            **self._fleet.step_costs(),
            **others,
            "time/step_s": step_s,
            "time/wait_data_s": clocks.parts.get("wait_data", 0.0),
            "time/learn_s": learn_s,
            "time/total_s": progress.seconds,
            "throughput/rollout_tokens_per_s": (arrived - self._arrived_tokens) / step_s,
            "throughput/train_tokens_per_s": metrics.get("train/tokens", 0.0) / max(learn_s, 1e-9),
            "rollout/replacements": self._fleet.supervisor.replacements,
            "rollout/in_rotation": len(self._fleet.rotation()),
        }
        self._arrived_tokens = arrived
        self._reporter.row(row)
        self._fleet.draw(self._timeline)
        self._reporter.timeline(progress.step, self._timeline.take())
