"""What test_changing_threads.py runs inside rank processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from learner_helpers import make_groups, make_job, make_place
from rank_jobs import JACKPOT, RECORDING, RecordingEngine, arrays, share, untimed

from rlcore.learner.cpu import spare_cores
from rlcore.learner.cpu.spare_cores import Usage
from rlcore.learner.rank import LearnerRank

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"corrections": JACKPOT, "kl_coef": 0.1},
    "checkpointing": {"gradient_checkpointing": True, "zero_stage": 3},
    "lora": {"lora": {"rank": 4}},
    "bfloat16": {"dtype": "bfloat16", "zero_stage": 2},
}


def _follow(seen: list[int], free: Callable[[int], float]) -> None:
    """Have this process find `free(look)` other cores idle at its looks, and note its threads."""
    looks = count(1)
    idle = [0.0]

    def usage(*_: object) -> Usage:
        seen.append(torch.get_num_threads())
        look = next(looks)
        idle[0] += 0.1 * free(look)
        return Usage(0.1 * look, 0.1 * look, idle[0])

    spare_cores.usage = usage  # type: ignore[assignment]
    spare_cores.WINDOW_S = 0.0
    spare_cores.Claims.claim = lambda *_: True  # type: ignore[method-assign, assignment]
    os.sched_getaffinity = lambda _: set(range(4))  # type: ignore[assignment]


def threads_that_change(rank: int, world: int, port: int, model: str) -> dict[str, Any]:
    """variant -> gradients and row with one thread, with up to three, and the threads that the
    latter had at its layers; three cores are free in turns."""
    seen: list[int] = []
    _follow(seen, lambda look: 3.0 if look % 8 > 4 else 0.0)
    out = {}
    groups = make_groups(6, samples=6)
    for name, options in VARIANTS.items():
        found: list[Any] = []
        for follows in (False, True):
            seen.clear()
            settings = options | {"micro_batch_tokens": 40, "max_threads": 3}
            job = replace(make_job(model, engine=RECORDING, **settings), follows_load=follows)
            one = LearnerRank(job, make_place(rank, world, port))
            one.begin_phase([groups])
            row = untimed(one.train_step(0))
            assert isinstance(one.engine, RecordingEngine)
            found += [one.engine.gradients, row]
            assert torch.get_num_threads() == 1
        out[name] = (*found, list(seen))
    return out


def threads_of_each(rank: int, world: int, port: int, model: str) -> Any:
    """Weights after three clipped steps of two ranks, the first of which has up to four threads,
    and its threads at its layers; all four cores are free to the first."""
    seen: list[int] = []
    _follow(seen, lambda look: 3.0 * (rank == 0))
    job = replace(make_job(model, lr=0.1, grad_clip=1e-3, max_threads=4), follows_load=True)
    one = LearnerRank(job, make_place(rank, world, port))
    for step in range(3):
        one.begin_phase([share(make_groups(6, samples=6), rank, world)])
        one.train_step(step)
    return arrays({n: p.detach() for n, p in one.engine.names.items()}), seen
