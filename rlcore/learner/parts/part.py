"""The base of what a rank of the learner has besides its engine and the policy's update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlcore.interfaces import Reduce
    from rlcore.learner.batch import StepBatch
    from rlcore.learner.packing import EpisodeTokens, MicroBatch
    from rlcore.learner.state_files import Schedule

    #: this rank's micro-batches of some episodes, as many as every other rank has
    LayOut = Callable[[Sequence[EpisodeTokens]], list[MicroBatch]]


class LearnerPart:
    """A part of a rank. `build.py` makes it, and each rank calls all parts in the same order; a
    method that a part does not override does nothing.

    What a run's configuration is asked about the part stands in `config/parts`.
    """

    def begin(self, phase: Sequence[StepBatch], lay_out: LayOut) -> None:
        """Before p_ref of an update phase is computed. Collective."""

    def metrics(self, reduce: Reduce) -> dict[str, float]:
        """Metrics since the last call, over all ranks, after the policy's step. Collective."""
        return {}

    def save(self, folder: Path, schedule: Schedule) -> None:
        """Write what later steps depend on besides weights; on rank 0 alone. `schedule` receives
        the writing of each file."""

    def load(self, folder: Path) -> None:
        """Continue from `save`, on every rank; `folder` may lack the part's files."""
