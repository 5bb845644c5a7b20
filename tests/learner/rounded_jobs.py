"""What the tests of rounded layers run inside rank processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from learner_helpers import make_groups, make_job, make_place
from rank_jobs import RECORDING, RecordingEngine, share, state, untimed

from rlcore.learner.rank import LearnerRank
from rlcore.weights.specs import RoundingSpec

Found = tuple[dict[str, np.ndarray], dict[str, float]]


def _learner(
    rank: int, world: int, port: int, model: str, kind: Any, stage: int, **settings: Any
) -> LearnerRank:
    options = {"zero_stage": stage, "engine": RECORDING, "corrections": {"tis": {}}, **settings}
    job = replace(make_job(model, **options), rounding=RoundingSpec(rounding=kind))
    return LearnerRank(job, make_place(rank, world, port))


def rounded_gradients(
    rank: int, world: int, port: int, model: str, cases: list[tuple[Any, int, dict[str, Any]]]
) -> list[Found]:
    """Gradients and row of the first step, of each case: format, ZeRO stage, settings."""
    mine = share(make_groups(5), rank, world)
    out = []
    for kind, stage, settings in cases:
        one = _learner(rank, world, port, model, kind, stage, **settings)
        one.begin_phase([mine, mine])
        row = untimed(one.train_step(0))
        assert isinstance(one.engine, RecordingEngine)
        out.append((one.engine.gradients, row))
    return out


def rounded_twice(
    rank: int, world: int, port: int, model: str, kind: Any, stage: int, folder: str
) -> dict[str, Any]:
    """Two steps, and the second once more after a load of what was saved before it."""
    batches = [share(make_groups(5, seed=s, first_id=10 * s), rank, world) for s in range(2)]

    def step(one: LearnerRank, number: int) -> dict[str, float]:
        one.begin_phase([batches[number]])
        return untimed(one.train_step(number))

    one = _learner(rank, world, port, model, kind, stage)
    started, first = state(one), step(one, 0)
    one.save(Path(folder))
    rows = [first, step(one, 1)]
    again = _learner(rank, world, port, model, kind, stage)
    again.load(Path(folder))
    return {
        "rows": rows,
        "again": step(again, 1),
        "started": started,
        "weights": state(one),
        "weights again": state(again),
    }
