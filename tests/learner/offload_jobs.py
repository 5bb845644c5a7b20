"""What the offload tests run inside rank processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from learner_helpers import make_groups
from rank_jobs import RECORDING, arrays, learner, share, state, untimed

from rlcore.types import POLICY

#: what is trained, by name
TRAINED: dict[str, dict[str, Any]] = {
    "clipped": {"grad_clip": 0.05, "weight_decay": 0.1},
    "bfloat16": {"dtype": "bfloat16", "grad_clip": 1e3},
    "adapters": {"lora": {"rank": 4}, "kl_coef": 0.1, "grad_clip": 1e3},
}
BOTH = {"optimizer": "cpu", "parameters": "cpu"}


def trained_with(
    rank: int, world: int, port: int, model: str, offload: dict[str, Any], folder: str, kind: str
) -> dict[str, Any]:
    """Three steps of several micro-batches with `offload`, and the last one again from the
    checkpoint before it."""
    options: dict[str, Any] = {"zero_stage": 3, "micro_batch_tokens": 25, "offload": offload}
    options |= {"engine": RECORDING, "lr": 1e-2, **TRAINED[kind]}

    def step(one: Any, s: int) -> dict[str, float]:
        one.begin_phase([share(make_groups(5, seed=s, first_id=10 * s), rank, world)])
        return untimed(one.train_step(s))

    one = learner(rank, world, port, model, **options)
    rows = [step(one, 0), step(one, 1)]
    assert one.engine.backwards > 4  # several a step
    here = Path(folder) / kind
    if not (here / "learner.json").exists():
        one.save(here)
    rows.append(step(one, 2))
    again = learner(rank, world, port, model, **options)
    again.load(here)
    loaded = arrays(dict(again.engine.trained_weights()))
    row = step(again, 2)
    published = arrays({n: w.float() for n, w in one.published_weights(POLICY, "bfloat16")})
    kept = one.engine._state
    after = arrays(dict(one.engine.trained_weights()))
    held = {n: (p.start, p.values.numel()) for n, p in one.held_weights().items()}
    return {
        "rows": rows,
        "again": row,
        "loaded": loaded,
        "state": state(one),
        "resumed": state(again),
        "published": published,
        "held": held,
        "gradients": one.engine.gradients,
        "moved": max(np.abs(w - loaded[n]).max() for n, w in after.items()),
        "on disk": [kept._on_disk(group) for group, _ in kept._groups()],
    }
