"""What the adapter tests run inside rank processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from learner_helpers import make_groups
from rank_jobs import arrays, learner, share

LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}
SEQUENCES = [([3, 4, 5], [6, 7, 8, 1]), ([9, 3], [4, 1])]


def train_adapters(rank: int, world: int, port: int, model: str, stage: int, folder: str) -> dict[str, Any]:
    """Three steps on adapters with a save after the second, a load elsewhere, and everything that can be handed out."""
    options: dict[str, Any] = {"zero_stage": stage, "lora": LORA, "lr": 1e-2, "micro_batch_tokens": 60}
    one = learner(rank, world, port, model, **options)
    before = arrays(one.state_for_publish("float32"))
    groups = [share(make_groups(5, seed=s, first_id=10 * s), rank, world) for s in range(3)]
    one.begin_phase([groups[0]])
    one.update.run(one._phase[0], 0, first=True)
    gradients = arrays(one.engine.full_gradients())
    one.engine.step()
    one.begin_phase([groups[1]])
    one.train_step(1)
    one.save(Path(folder) / "state")
    one.begin_phase([groups[2]])
    row = one.train_step(2)
    scores = one.score(SEQUENCES)
    one.export(Path(folder) / "export")
    resumed = learner(rank, world, port, model, **options)
    resumed.load(Path(folder) / "state")
    resumed.begin_phase([groups[2]])
    again = resumed.train_step(2)
    return {
        "before": before,
        "after": arrays(one.state_for_publish("float32")),
        "resumed": arrays(resumed.state_for_publish("float32")),
        "gradients": gradients,
        "scores": [np.asarray(s) for s in scores],
        "norms": (row["grad_norm"], again["grad_norm"]),
    }
