"""The row of each step: what learner, buffer and fleet have to say of it, with times and rates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from rlcore.errors import NoSpace
from rlcore.interfaces import Reporter
from rlcore.loop.clients import BufferClient
from rlcore.loop.fleet import Fleet
from rlcore.loop.plan import Progress
from rlcore.loop.timeline import Timeline
from rlcore.loop.timing import Clocks, now

SPACE_POLL_S = 2.0  # between two looks whether a full disk has space again


class RowWriter:
    """Writes one row a step. Counts of a resumed run go on from its checkpoint's."""

    def __init__(
        self,
        buffer: BufferClient,
        fleet: Fleet,
        progress: Progress,
        reporter: Reporter,
        timeline: Timeline,
        *,
        space_timeout_s: float,
        stopping: Callable[[], bool],
    ) -> None:
        """`space_timeout_s`: how long a full disk is waited for, unless the run is `stopping`."""
        self._buffer = buffer
        self._fleet = fleet
        self._progress = progress
        self._reporter = reporter
        self._timeline = timeline
        self._space_timeout_s = space_timeout_s
        self._stopping = stopping
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
        await self._write(row)
        self._fleet.draw(self._timeline)
        self._reporter.timeline(progress.step, self._timeline.take())

    async def _write(self, row: dict[str, float | int | None]) -> None:
        """Report a row; training waits while the disk has no space for it. Raises NoSpace."""
        until = now() + self._space_timeout_s
        waiting = False
        while True:
            try:
                self._reporter.row(row)
            except NoSpace as e:
                if now() >= until or self._stopping():
                    raise
                if not waiting:
                    self._reporter.note(
                        f"{e}: training waits for space until "
                        f"schedule.wait_space_timeout_s={self._space_timeout_s:g} s have passed"
                    )
                waiting = True
                await asyncio.sleep(SPACE_POLL_S)
                continue
            if waiting:
                self._reporter.note("there is space again: training continues")
            return
