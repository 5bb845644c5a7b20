"""What the tests of a teacher run inside rank processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from learner_helpers import make_groups, make_job, make_place
from rank_jobs import share, state, untimed

from rlcore.learner.rank import LearnerRank
from rlcore.objectives.specs import TeacherSpec

ALONE = {"advantage": "reinforce", "loss": "reinforce", "reward_weight": 0.0}


def taught_once(
    rank: int,
    world: int,
    port: int,
    model: str,
    stage: int,
    spec: TeacherSpec,
    folder: str,
    lora: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Two epochs of a phase of two batches, and the rest of them after a load in the middle."""
    options = {"zero_stage": stage, "micro_batch_tokens": 60, "lr": 5e-3, "lora": lora}
    job = make_job(model, teacher=spec, **options, **ALONE)

    def learner() -> LearnerRank:
        return LearnerRank(job, make_place(rank, world, port))

    one = learner()
    batches = [share(make_groups(5, seed=s, first_id=10 * s), rank, world) for s in range(2)]
    one.begin_phase([batches[0]])
    one.train_step(0)  # kind=previous is refreshed from this on, and is no folder's model any more
    one.save(Path(folder) / "begun")
    one.begin_phase(batches, steps=4)
    rows = []
    for step in range(1, 5):
        if step == 4:
            one.save(Path(folder) / "state")
        rows.append(untimed(one.train_step(step)))
    resumed = learner()
    resumed.load(Path(folder) / "begun")
    resumed.begin_phase([batches[1]], steps=1, first=False)
    resumed.load(Path(folder) / "state", keep_phase=True)
    again = untimed(resumed.train_step(4))
    return {
        "rows": rows,
        "again": again,
        "published": one.published,
        "policy": state(one),
        "policy again": state(resumed),
    }
