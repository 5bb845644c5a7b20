"""Gradient of N micro-batches against one big batch, at every ZeRO stage and several rank counts.

    python -m benchmarks.evidence.gradient_equality --ranks 1 2 --dtype float32

The reference is one rank, ZeRO-0, one micro-batch. Ranks get unequal shares of whole groups.
Jackpot and veto are on, so that masks, weights and normalisers need statistics of the global batch.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.testing.records import make_group, make_sampling, make_trajectory
from rlcore.types import Group, Trajectory

VOCAB = 15
MICRO_BATCH_TOKENS = (100_000, 200, 40)
TOPK = 4
ENGINE = f"{Path(__file__).resolve().parent / 'recording_engine.py'}:RecordingEngine"


def make_groups(count: int, samples: int = 4) -> list[Group]:
    """Groups of random episodes of one turn, with random rewards."""
    rng = np.random.default_rng(0)
    groups = []
    for g in range(count):
        prompt = rng.integers(3, VOCAB, rng.integers(2, 9))
        drawn = [
            (random_trajectory(rng, g, i, prompt), float(rng.random())) for i in range(samples)
        ]
        groups.append(make_group([t for t, _ in drawn], [r for _, r in drawn]))
    return groups


def random_trajectory(
    rng: np.random.Generator, group_id: int, sample_index: int, prompt: np.ndarray
) -> Trajectory:
    length = int(rng.integers(1, 20))
    response = rng.integers(3, VOCAB, length)
    return make_trajectory(
        group_id,
        sample_index,
        turns=[(prompt.tolist(), response.tolist())],
        logp_inf=(-2.7 + 0.3 * rng.standard_normal(length)).astype(np.float32),
        topk_ids=np.argsort(rng.random((length, VOCAB)))[:, :TOPK].astype(np.int32),
        topk_logp=np.full((length, TOPK), np.log(0.1), np.float32),
    )


def rank_main(
    pipe: Any, rank: int, world: int, port: int, model: str, dtype: str, stages: list[int]
) -> None:
    """One rank's process: sends {(stage, micro-batch tokens): (gradients, norm, micro-batches)}."""
    from rlcore.corrections.jackpot import JackpotSpec
    from rlcore.corrections.veto import VetoSpec
    from rlcore.learner.rank import LearnerRank
    from rlcore.learner.specs import LearnerJob, LearnerSpec, RankPlace
    from rlcore.objectives.specs import ObjectiveSpec

    groups = make_groups(12)
    share = groups if world == 1 else (groups[: -world + 1] if rank == 0 else [groups[-rank]])
    place = RankPlace(rank, world, "127.0.0.1", port, timeout_s=600)
    table = {}
    for stage in stages:
        for tokens in MICRO_BATCH_TOKENS:
            job = LearnerJob(
                model_path=model,
                learner=LearnerSpec(
                    engine=ENGINE,
                    ranks=world,
                    lr=1e-3,
                    dtype=dtype,  # type: ignore[arg-type]
                    zero_stage=stage,  # type: ignore[arg-type]
                    micro_batch_tokens=tokens,
                ),
                objective=ObjectiveSpec(),
                corrections={"jackpot": JackpotSpec(), "veto": VetoSpec()},
                sampling=make_sampling(logprobs_k=TOPK),
                total_steps=10,
                run_seed=0,
                pad_id=0,
            )
            one = LearnerRank(job, place)
            one.begin_phase([share])
            norm = one.train_step(0)["grad_norm"]
            table[stage, tokens] = one.engine.gradients, norm, one.engine.backwards
    pipe.send(table)


def on_ranks(world: int, *args: Any) -> dict[tuple[int, int], Any]:
    """Rank 0's table, from `world` fresh processes."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        context.Process(target=rank_main, args=(pipes[rank][1], rank, world, port, *args))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    tables = [ours.recv() for ours, _ in pipes]
    for process in processes:
        process.join()
    return tables[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from rlcore.models.fresh import build_fresh_model
    from rlcore.models.specs import FreshModelSpec

    # stage 0 would accumulate gradients in bfloat16 and is refused
    stages = [0, 1, 2, 3] if args.dtype == "float32" else [1, 2, 3]
    # sizes that two ranks do not divide evenly
    spec = FreshModelSpec(
        hidden_size=66, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate_size=63
    )
    with tempfile.TemporaryDirectory() as folder:
        model = str(build_fresh_model(folder, "0123456789=+", spec, seed=0, max_len=64))
        tables = {world: on_ranks(world, model, args.dtype, stages) for world in args.ranks}
    show(tables, tables[args.ranks[0]][stages[0], MICRO_BATCH_TOKENS[0]], args.dtype)


def show(tables: dict[int, dict[tuple[int, int], Any]], base: Any, dtype: str) -> None:
    """Print the differences of all tables to the reference gradient."""
    reference, norm, _ = base
    largest = max(float(np.abs(g).max()) for g in reference.values())
    print(f"{dtype}; reference gradient: norm {norm:.5f}, largest entry {largest:.5f}")
    print("| ranks | ZeRO | micro-batches per rank | largest difference | norm |")
    print("| --- | --- | --- | --- | --- |")
    worst = 0.0
    for world, table in tables.items():
        for (stage, _), (gradients, its_norm, count) in table.items():
            difference = max(
                float(np.abs(gradients[name] - reference[name]).max()) for name in reference
            )
            worst = max(worst, difference)
            print(f"| {world} | {stage} | {count} | {difference:.1e} | {its_norm:.5f} |")
    print(f"largest of all: {worst:.1e}")


if __name__ == "__main__":
    main()
