"""What the tests of split learners run inside rank processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from learner_helpers import make_groups
from rank_jobs import RECORDING, RecordingEngine, learner, state, untimed

from rlcore.learner.engines.deepspeed import ZeroEngine
from rlcore.learner.rank import LearnerRank
from rlcore.learner.sequences import TokenSequence
from rlcore.types import Group

JACKPOT: dict[str, dict[str, Any]] = {"jackpot": {}, "veto": {"threshold": 1e-4}}
VARIANTS: dict[str, dict[str, Any]] = {
    **{
        f"stage {stage}": {"zero_stage": stage, "corrections": JACKPOT, "entropy_coef": 0.01}
        for stage in (0, 1, 2, 3)
    },
    "one micro-batch": {"micro_batch_tokens": 10_000, "corrections": {"tis": {}}},
    "packed": {"layout": "packed", "share_prefix": "off", "corrections": {"ais": {}}},
    "sorted": {
        "layout": "sorted",
        "share_prefix": "off",
        "loss": "gspo",
        "corrections": {"mis": {}},
    },
    "checkpointing": {"gradient_checkpointing": True, "zero_stage": 3, "kl_coef": 0.1},
    "full kl": {"kl_coef": 0.1, "kl_estimator": "full", "corrections": {"rapid": {}}},
    "dvp": {"corrections": {"dvp": {"rho": 0.02}, "tis": {"level": "sequence"}}},
    "lora": {"lora": {"rank": 4}, "zero_stage": 2},
    "accepted": {"keep_by_acceptance": 2, "corrections": {"ais": {}}, "zero_stage": 1},
}
# moments tell of the clip, which Adam's steps of one size do not
CLIPPED = {"grad_clip": 0.05, "weight_decay": 0.1, "corrections": JACKPOT}
VARIANTS |= {f"clipped {n}": {"zero_stage": n, **CLIPPED} for n in (0, 1, 2)}
#: whose sums keep eight bits
ROUNDED = ["bfloat16 1", "bfloat16 2"]
VARIANTS |= {f"bfloat16 {n}": {**VARIANTS[f"clipped {n}"], "dtype": "bfloat16"} for n in (1, 2)}

#: with parts of the experts: no ZeRO-3, no adapters
OF_EXPERTS = ["stage 0", "stage 1", "stage 2", "one micro-batch", "packed", "sorted", "full kl"]
OF_EXPERTS += ["dvp", "accepted", "recomputed", "clipped 0", "clipped 1", "clipped 2"]
#: with parts of layers: no ZeRO-3, no adapters
OF_LAYERS = ["stage 0", "stage 1", "stage 2", "one micro-batch", "packed", "full kl", "dvp"]
OF_LAYERS += ["accepted", "recomputed"]
VARIANTS["recomputed"] = {"gradient_checkpointing": True, "kl_coef": 0.1, "zero_stage": 1}


def steps(
    rank: int, world: int, port: int, model: str, parts: dict[str, int], only: list[str] | None
) -> dict[str, Any]:
    """variant -> gradients of a first step and moments after it, the rows of two, and weights after
    them: the second step's gradients are those of weights that Adam has divided rounding into.
    Ranks that hold parts of the same matrices or sequences have the same groups; `parts`: the key
    that says so."""
    out = {}
    share = np.prod([n for key, n in parts.items() if key != "expert_parallel"], dtype=int)
    for name, options in VARIANTS.items():
        if only is not None and name not in only:
            continue
        settings = {"micro_batch_tokens": 40, "ranks": world, **options, **parts}
        one = learner(rank, world, port, model, engine=RECORDING, **settings)
        groups = make_groups(5)
        mine = dealt(groups, rank // share, world // share)
        one.begin_phase([mine, mine])
        row = untimed(one.train_step(0))
        assert isinstance(one.engine, RecordingEngine)
        gradients, moments = one.engine.gradients, _moments(one.engine)
        rows = [row, untimed(one.train_step(1))]
        out[name] = gradients, rows, moments, state(one)
    return out


def _moments(engine: ZeroEngine) -> dict[str, np.ndarray]:
    """First moments: sums of clipped gradients."""
    engine._state._link_moments()  # as before they are saved
    read = partial(engine._state._read, key="exp_avg")
    return {name: read(p).float().numpy().copy() for name, p in engine.trained.items()}


def dealt(groups: list[Group], index: int, count: int) -> list[Group]:
    return groups if count == 1 else groups[index::count]


PROBE = [
    TokenSequence.of_answer([5, 7, 14], [5, 7, 1]),
    TokenSequence.of_answer([3, 3, 14, 3], [9]),
]


def _supervised(one: LearnerRank, step: int) -> None:
    """A step on the same examples on every rank."""
    rng = np.random.default_rng(step)
    digits = rng.integers(3, 13, (6, 2)).tolist()
    one.sft_step(step, [TokenSequence.of_answer([*d, 14], [*d, 1]) for d in digits])


def _described(one: LearnerRank) -> dict[str, Any]:
    weights = dict(one.published_weights("policy", "float32"))
    return {
        "weights": {name: w.numpy() for name, w in weights.items()},
        "scores": np.concatenate(one.score(PROBE)),
        "steps": one.engine.optimizer_steps,
    }


def save(
    rank: int, world: int, port: int, model: str, folder: str, parts: dict[str, int]
) -> dict[str, Any]:
    """Two supervised steps at ZeRO-1, their state, and what comes of them."""
    one = learner(rank, world, port, model, zero_stage=1, ranks=world, lr=3e-3, **parts)
    for step in range(2):
        _supervised(one, step)
    one.save(folder)
    return _described(one)


def load(
    rank: int, world: int, port: int, model: str, folder: str, parts: dict[str, int]
) -> dict[str, Any]:
    """What a state that other ranks wrote holds, and the weights a further step after it."""
    one = learner(rank, world, port, model, zero_stage=2, ranks=world, lr=3e-3, **parts)
    one.load(folder)
    found = _described(one)
    _supervised(one, 2)
    return found | {"after": _described(one)["weights"]}
