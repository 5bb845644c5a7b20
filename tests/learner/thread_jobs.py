"""What test_spare_cores.py runs inside rank processes."""

from __future__ import annotations

import os
from itertools import count
from typing import Any

import torch
from learner_helpers import make_groups
from rank_jobs import JACKPOT, RECORDING, RecordingEngine, learner, untimed

from rlcore.learner import cpu_speed
from rlcore.learner.cpu_speed import Usage

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"corrections": JACKPOT, "kl_coef": 0.1},
    "checkpointing": {"gradient_checkpointing": True, "zero_stage": 3},
    "lora": {"lora": {"rank": 4}},
    "bfloat16": {"dtype": "bfloat16", "zero_stage": 2},
}


def threads_that_change(rank: int, world: int, port: int, model: str) -> dict[str, Any]:
    """variant -> gradients and row without `max_threads`, with it, and the threads that the latter
    had at its layers; three cores are free in turns."""
    seen: list[int] = []
    steps = count(1)

    def usage(_cores: object) -> Usage:
        seen.append(torch.get_num_threads())
        at = 0.1 * next(steps)
        # within a period of eight looks: three other cores idle in the second half
        periods, into = divmod(round(at / 0.1), 8)
        return Usage(at, at, 0.3 * (4 * periods + max(0, into - 4)))

    cpu_speed.usage = usage  # type: ignore[assignment]
    cpu_speed.WINDOW_S = 0.0
    os.sched_getaffinity = lambda _: set(range(4))  # type: ignore[assignment]
    out = {}
    groups = make_groups(6, samples=6)
    for name, options in VARIANTS.items():
        found: list[Any] = []
        for more in ({}, {"max_threads": 3}):
            seen.clear()
            settings = options | {"micro_batch_tokens": 40} | more
            one = learner(rank, world, port, model, engine=RECORDING, **settings)
            one.begin_phase([groups])
            row = untimed(one.train_step(0))
            assert isinstance(one.engine, RecordingEngine)
            found += [one.engine.gradients, row]
            torch.set_num_threads(1)
        out[name] = (*found, list(seen))
    return out
