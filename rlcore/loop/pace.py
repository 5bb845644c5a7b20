"""When checkpoints are due: every so many steps, and every so many seconds as long as they are
cheap."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rlcore.loop.specs import CheckpointSpec
from rlcore.loop.timing import now

COST_SHARE = 0.02  # of the time between two checkpoints that a run may stand still for one


class CheckpointPace:
    """Decides when a checkpoint is due, and measures what each one costs.

    Time is the event loop's (`timing.now`).
    """

    def __init__(self, spec: CheckpointSpec, note: Callable[[str], None]) -> None:
        self.interval_s = spec.every_s  # grows where one checkpoint costs more than COST_SHARE
        self._every = spec.every
        self._note = note
        self._since = 0.0  # when the last one was taken, or the run began
        self._standstill_s = 0.0  # since the last `take_standstill_s`

    def begin(self) -> None:
        """The time to the first checkpoint begins."""
        self._since = now()

    def due_by_steps(self, step: int) -> bool:
        """Whether `step` is one of those that `checkpoint.every` names."""
        return bool(self._every) and step % self._every == 0

    def due_by_time(self) -> bool:
        """Whether the last one was taken `interval_s` ago."""
        return bool(self.interval_s) and now() - self._since >= self.interval_s

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """Around all that training stands still for. The interval grows if that was too long."""
        begun = now()
        try:
            yield
        finally:
            self._since = now()
            self._spent(self._since - begun)

    def _spent(self, seconds: float) -> None:
        self._standstill_s += seconds
        if 0 < self.interval_s < seconds / COST_SHARE:
            # by half at least: checkpoints of a growing run are each a little slower
            self.interval_s = max(seconds / COST_SHARE, 1.5 * self.interval_s)
            self._note(
                f"training stood still for {seconds:.1f} s for a checkpoint: those by time come "
                f"every {self.interval_s:.0f} s from now on, so that they cost at most "
                f"{COST_SHARE:.0%} of the run (checkpoint.every_s)"
            )

    def take_standstill_s(self) -> float:
        """Seconds that training stood still for checkpoints since the last call."""
        seconds, self._standstill_s = self._standstill_s, 0.0
        return seconds
