"""Jobs of ranks whose steps are bounded."""

from typing import Any

from learner_helpers import make_groups, make_job, make_place

from rlcore.learner.rank import LearnerRank


def stale_rows(rank: int, world: int, port: int, model: str, **settings: Any) -> list[dict]:
    """Rows of three steps on the same six groups of version 0, divided among the ranks."""
    learner = LearnerRank(make_job(model, **settings), make_place(rank, world, port))
    rows = []
    for step in range(3):
        learner.begin_phase([make_groups(6)[rank::world]])
        rows.append(learner.train_step(step))
    return rows
