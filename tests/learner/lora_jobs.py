"""What the adapter tests run inside rank processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from learner_helpers import make_groups
from rank_jobs import RECORDING, learner, share, state

from rlcore.learner.sequences import TokenSequence
from rlcore.types import POLICY

LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}
PAIRS = [([3, 4, 5], [6, 7, 8, 1]), ([9, 3], [4, 1])]
SEQUENCES = [TokenSequence.of_answer(*pair) for pair in PAIRS]


def train_adapters(
    rank: int, world: int, port: int, model: str, stage: int, folder: str
) -> dict[str, Any]:
    """Three steps on adapters with a save after the second, a load elsewhere, and everything that
    can be published."""
    options: dict[str, Any] = {
        "zero_stage": stage,
        "lora": LORA,
        "lr": 1e-2,
        "micro_batch_tokens": 60,
        "engine": RECORDING,
    }
    one = learner(rank, world, port, model, **options)
    before = state(one)
    groups = [share(make_groups(5, seed=s, first_id=10 * s), rank, world) for s in range(3)]
    one.begin_phase([groups[0]])
    one.train_step(0)
    gradients = one.engine.gradients
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
        "after": state(one),
        "resumed": state(resumed),
        "gradients": gradients,
        "scores": [np.asarray(s) for s in scores],
        "norms": (row["grad_norm"], again["grad_norm"]),
    }


def published_adapter(
    rank: int, world: int, port: int, model: str, stage: int, dtype: str
) -> dict[str, Any]:
    """What is published of the same training as an adapter alone, as merged weights, and the
    learner's own scores of each."""
    out: dict[str, Any] = {}
    for publish in ("adapter", "merged"):
        lora = {**LORA, "alpha": 6.0, "publish": publish}
        options = {"zero_stage": stage, "dtype": dtype, "lora": lora, "lr": 1e-2}
        one = learner(rank, world, port, model, **options)
        for s in range(2):
            one.begin_phase([share(make_groups(5, seed=s, first_id=10 * s), rank, world)])
            one.train_step(s)
        weights = dict(one.published_weights(POLICY, dtype))
        out[publish] = {name: w.float().numpy() for name, w in weights.items()}
        out[f"{publish} shapes"] = one.published_shapes(POLICY)
        some = list(out[f"{publish} shapes"])[1:3]
        out[f"{publish} some"] = [n for n, _ in one.published_weights(POLICY, dtype, some)]
        out[f"{publish} scores"] = [np.asarray(score) for score in one.score(SEQUENCES)]
    return out


def published_bfloat16(
    rank: int, world: int, port: int, model: str, stage: int
) -> dict[str, dict[str, np.ndarray] | list[np.ndarray]]:
    """What is published of adapters on a bfloat16 model, and the learner's own scores."""
    options: dict[str, Any] = {"zero_stage": stage, "dtype": "bfloat16", "lora": LORA, "lr": 1e-2}
    one = learner(rank, world, port, model, **options)
    for s in range(2):
        one.begin_phase([share(make_groups(5, seed=s, first_id=10 * s), rank, world)])
        one.train_step(s)
    weights = dict(one.published_weights(POLICY, "bfloat16"))
    return {
        "weights": {name: w.float().numpy() for name, w in weights.items()},
        "scores": [np.asarray(score) for score in one.score(SEQUENCES)],
    }
