"""What the tests of masked-diffusion ranks run inside rank processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from learner_helpers import make_job, make_place
from rank_jobs import RECORDING, RecordingEngine, arrays, share, untimed

from rlcore.learner.rank import LearnerRank
from rlcore.models.specs import DiffusionSpec
from rlcore.types import POLICY, Group

SPEC = DiffusionSpec(block=4, prompt_masking=0.4)


def masked_rank(rank: int, world: int, port: int, model: str, **settings: Any) -> LearnerRank:
    job = make_job(model, logprobs_k=0, corrections={"ais": {}}, engine=RECORDING, **settings)
    return LearnerRank(replace(job, diffusion=SPEC), make_place(rank, world, port))


def first_gradient(
    rank: int, world: int, port: int, model: str, groups: list[Group], settings: dict[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Whole gradients and metrics of a first step, the groups divided among the ranks."""
    one = masked_rank(rank, world, port, model, **settings)
    one.begin_phase([share(groups, rank, world)])
    row = one.train_step(0)
    assert isinstance(one.engine, RecordingEngine)
    return one.engine.gradients, untimed(row)


def resumed_step(
    rank: int, world: int, port: int, model: str, groups: list[Group], folder: str
) -> list[tuple[dict[str, np.ndarray], dict[str, float]]]:
    """Weights and metrics after two steps: in one go, and with a checkpoint between them."""
    found = []
    for resumes in (False, True):
        one = masked_rank(rank, world, port, model)
        one.begin_phase([groups])
        one.train_step(0)
        if resumes:
            one.save(Path(folder))
            one = masked_rank(rank, world, port, model)
            one.load(Path(folder))
        one.begin_phase([groups])
        row = untimed(one.train_step(1))
        found.append((arrays(dict(one.published_weights(POLICY, "float32"))), row))
    return found
