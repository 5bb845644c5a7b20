"""What real ranks of a small model hold, beside what is counted for them."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import torch
from learner_helpers import (
    ALPHABET,
    make_batch,
    make_groups,
    make_job,
    make_place,
    make_update,
    on_ranks,
)
from live_bytes import LiveBytes

from rlcore.learner.engines.deepspeed_facts import learner_rank
from rlcore.learner.packing import dummy
from rlcore.learner.rank import LearnerRank
from rlcore.learner.ranks import RankReduce, join_ranks
from rlcore.models.folder import read_config, read_shapes
from rlcore.models.fresh import build_fresh_model
from rlcore.models.sizes import ModelSizes, total
from rlcore.models.specs import FreshModelSpec

SHAPE = FreshModelSpec(
    hidden_size=256, layers=4, heads=4, kv_heads=2, head_dim=64, intermediate_size=768
)
NONE, CPU = "none", "cpu"  # where ZeRO-3 keeps its states and parameters
CASES = [(stage, "float32", NONE) for stage in (0, 1, 2, 3)]
CASES += [(stage, "bfloat16", NONE) for stage in (1, 2, 3)]
CASES += [(3, "bfloat16", CPU)]
Case = tuple[int, str, str]


def options(stage: int, dtype: str, where: str, world: int) -> dict[str, Any]:
    return {
        "zero_stage": stage,
        "dtype": dtype,
        "ranks": world,
        "micro_batch_tokens": 512,
        "gradient_checkpointing": True,
        "share_prefix": "off",
        "offload": {"optimizer": where, "parameters": where},
    }


def most_held(rank: int, world: int, port: int, model: str) -> dict[Case, int]:
    """case -> largest number of bytes alive in the second of two steps."""
    found = {}
    for case in CASES:
        with LiveBytes() as live:
            job = make_job(model, **options(*case, world))
            one = LearnerRank(job, make_place(rank, world, port))
            groups = make_groups(4, samples=8)
            for step in range(2):
                gc.collect()
                live.most = live.now
                one.begin_phase([groups])
                one.train_step(step)
            found[case] = live.most
        del one
        gc.collect()
    return found


def unequal_shares(rank: int, world: int, port: int, model: str) -> list[int]:
    """Forward passes of two steps, of which the first rank's do not fit the cache and the other's,
    nearly all dummies, would."""
    join_ranks(make_place(rank, world, port), torch.device("cpu"))
    reduce = RankReduce(torch.device("cpu"))
    kept = {"corrections": {"ais": {}}, "activation_cache_mib": 1}
    update, forwards = make_update(model, reduce=reduce, **kept), []
    for step in range(2):
        batch = make_batch(make_groups(1 if rank else 30), 400)
        count = int(reduce.max(torch.tensor(len(batch.micro))))
        batch.micro += [dummy()] * (count - len(batch.micro))
        begun = update.engine.forwards
        update.prepare([batch], first=True)
        update.run(batch, step, first=True)
        forwards.append(update.engine.forwards - begun)
    return [count, *forwards]


def compared(world: int) -> dict[Case, tuple[float, float]]:
    """case -> MiB that are counted for a rank, and that rank 0 held at most."""
    with tempfile.TemporaryDirectory() as folder:
        path = build_fresh_model(Path(folder) / "m", ALPHABET, SHAPE, seed=0, max_len=512)
        model = str(path)
        sizes = ModelSizes.of(read_config(model), read_shapes(model))
        held = on_ranks(world, most_held, model)[0]
    return {
        case: (
            total(learner_rank(sizes, make_job(model, **options(*case, world)).learner)) / 2**20,
            size / 2**20,
        )
        for case, size in held.items()
    }
