"""What the DistillSparse tests run inside rank processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from learner_helpers import make_groups, with_rewards
from lora_jobs import LORA
from rank_jobs import learner, share, state, untimed

from rlcore.attention.specs import SparseSpec
from rlcore.learner.sequences import TokenSequence
from rlcore.learner.specs import SPARSE_COPY

RULE = SparseSpec(block_size=2, blocks=2)  # sequences of up to 15 tokens: the budget covers four
SEQUENCES = [
    TokenSequence.of_answer([3, 4, 5], [6, 7, 8, 9, 10, 11, 1]),
    TokenSequence.of_answer([9, 3], [4, 5, 6, 7, 1]),
]


def distill(kl: str, **over: Any) -> dict[str, Any]:
    return {"kl": kl, "kl_coef": 1.0, "lr": 2e-2, "lora": LORA} | over


def distill_once(
    rank: int, world: int, port: int, model: str, stage: int, folder: str
) -> dict[str, Any]:
    """Two steps with and without a sparse copy, what is published, and a load in the middle."""
    plain_options: dict[str, Any] = {"zero_stage": stage, "micro_batch_tokens": 60}
    options = {**plain_options, "sparse": RULE, "distill": distill("k3")}
    plain = learner(rank, world, port, model, **plain_options)
    one = learner(rank, world, port, model, **options)
    steps = [share(make_groups(5, seed=s, first_id=10 * s), rank, world) for s in range(2)]
    rows = []
    for s, groups in enumerate(steps):
        if s == 1:
            one.save(Path(folder) / "state")
        plain.begin_phase([groups])
        plain.train_step(s)
        one.begin_phase([groups])
        rows.append(untimed(one.train_step(s)))
    one.export(Path(folder) / "export")
    resumed = learner(rank, world, port, model, **options)
    resumed.load(Path(folder) / "state")
    resumed.begin_phase([steps[1]])
    resumed.train_step(1)
    out: dict[str, Any] = {
        "rows": rows,
        "plain": state(plain),
        "policy": state(one),
        "copy": state(one, SPARSE_COPY),
        "resumed": state(resumed, SPARSE_COPY),
        "dense": [np.asarray(s) for s in one.score(SEQUENCES)],
        "sparse": [np.asarray(s) for s in one.score(SEQUENCES, of=SPARSE_COPY)],
    }
    return out


def score_sparse(
    rank: int, world: int, port: int, folder: str, rule: SparseSpec | None
) -> list[np.ndarray]:
    """An exported model through a rule of attention, in both layouts."""
    scores = []
    for layout in ("sorted", "packed"):
        one = learner(rank, world, port, folder, sparse=rule, layout=layout)
        scores.append([np.asarray(s) for s in one.score(SEQUENCES)])
    assert all(np.abs(a - b).max() < 2e-6 for a, b in zip(*scores))
    return scores[0]


def distill_only(rank: int, world: int, port: int, model: str) -> dict[str, list[dict[str, float]]]:
    """kl -> rows of repeated steps on a batch whose rewards are equal, so that only the
    distillation pulls."""
    out = {}
    groups = with_rewards(make_groups(4), lambda e: 1.0)
    for kl in ("k1", "k3", "topk", "full"):
        one = learner(rank, world, port, model, sparse=RULE, distill=distill(kl), lr=1e-12)
        rows = []
        for s in range(12):
            one.begin_phase([share(groups, rank, world)])
            rows.append(one.train_step(s))
        out[kl] = rows
    return out


def train_sparse(rank: int, world: int, port: int, model: str) -> dict[str, Any]:
    """The baseline: the policy itself is trained through sparse attention."""
    one = learner(rank, world, port, model, sparse=RULE, kl_coef=0.1)
    dense = learner(rank, world, port, model)
    one.begin_phase([share(make_groups(4), rank, world)])
    row = one.train_step(0)
    dense.begin_phase([share(make_groups(4), rank, world)])
    return {"row": row, "dense": dense.train_step(0)}
