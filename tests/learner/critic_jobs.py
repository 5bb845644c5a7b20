"""What the tests of a critic run inside rank processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from learner_helpers import make_groups, make_job, make_place
from rank_jobs import share, state, untimed

from rlcore.learner.rank import LearnerRank
from rlcore.learner.specs import CRITIC, CriticSpec

VTRACE = {"tis": {"cap": 3.0}}


def critic_once(
    rank: int, world: int, port: int, model: str, stage: int, spec: CriticSpec, folder: str
) -> dict[str, Any]:
    """Two epochs of a phase of two batches, and the rest of them after a load in the middle."""
    job = make_job(
        model,
        corrections=VTRACE,
        advantage="gae",
        credit="token",
        zero_stage=stage,
        micro_batch_tokens=60,
        critic=spec,
        lora=spec.lora,  # the policy has adapters where the critic has
    )

    def learner() -> LearnerRank:
        return LearnerRank(job, make_place(rank, world, port))

    one = learner()
    batches = [share(make_groups(5, seed=s, first_id=10 * s), rank, world) for s in range(2)]
    one.save(Path(folder) / "begun")
    one.begin_phase(batches, steps=4)
    rows = []
    for step in range(4):
        if step == 3:
            one.save(Path(folder) / "state")
        rows.append(untimed(one.train_step(step)))
    resumed = learner()
    resumed.load(Path(folder) / "begun")
    resumed.begin_phase([batches[1]], steps=1, first=False)
    resumed.load(Path(folder) / "state", keep_phase=True)
    again = untimed(resumed.train_step(3))
    return {
        "rows": rows,
        "again": again,
        "published": one.published,
        "policy": state(one),
        "policy again": state(resumed),
        "critic": state(one, CRITIC),
        "critic again": state(resumed, CRITIC),
    }
