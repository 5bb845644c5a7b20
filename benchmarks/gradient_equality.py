"""N micro-batches against one big batch: largest gradient difference at every ZeRO stage, with one rank and with more.

    python benchmarks/gradient_equality.py --ranks 1 2 --dtype float32

The reference is one rank, ZeRO-0, one micro-batch. Ranks get unequal shares of whole groups; Jackpot and veto are on,
so that masks, weights and normalisers need statistics of the global batch.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import tempfile
from typing import Any

import numpy as np

from rlcore.types import Group, Trajectory

VOCAB, MICRO_BATCH_TOKENS = 15, (100_000, 200, 40)


def make_groups(count: int, samples: int = 4, k: int = 4) -> list[Group]:
    rng = np.random.default_rng(0)
    groups = []
    for g in range(count):
        prompt = rng.integers(3, VOCAB, rng.integers(2, 9)).astype(np.int32)
        trajectories = []
        for i in range(samples):
            t = int(rng.integers(1, 20))
            trajectories.append(
                Trajectory(
                    prompt_ids=prompt,
                    response_ids=rng.integers(3, VOCAB, t).astype(np.int32),
                    logp_inf=(-2.7 + 0.3 * rng.standard_normal(t)).astype(np.float32),
                    topk_ids=np.argsort(rng.random((t, VOCAB)))[:, :k].astype(np.int32),
                    topk_logp=np.full((t, k), np.log(0.1), np.float32),
                    token_version=np.zeros(t, np.int32),
                    actor_id="made-up",
                    actor_kind="bf16",
                    group_id=g,
                    prompt_id=f"p{g}",
                    sample_index=i,
                    finish_reason="stop",
                    score_status="ok",
                    reward=float(rng.random()),
                )
            )
        groups.append(Group(g, f"p{g}", 0, trajectories))
    return groups


def rank_main(pipe: Any, rank: int, world: int, port: int, model: str, dtype: str, stages: list[int]) -> None:
    from rlcore.learner.learner import LearnerRank

    groups = make_groups(12)
    share = groups if world == 1 else (groups[: -world + 1] if rank == 0 else [groups[-rank]])
    table = {}
    for stage in stages:
        for tokens in MICRO_BATCH_TOKENS:
            one = LearnerRank(
                model_path=model,
                rank=rank,
                world_size=world,
                master_port=port,
                lr=1e-3,
                dtype=dtype,  # type: ignore[arg-type]
                zero_stage=stage,
                micro_batch_tokens=tokens,
                corrections={"jackpot": {}, "veto": {}},
                logprobs_k=4,
            )
            one.begin_phase([share])
            one.update.run(one._phase[0], 0, first=True)
            gradients = {name: g.numpy() for name, g in one.engine.full_gradients().items()}
            table[stage, tokens] = gradients, one.engine.grad_norm(), len(one._phase[0].micro)
    pipe.send(table)


def on_ranks(world: int, *args: Any) -> dict[tuple[int, int], Any]:
    """Rank 0's table, from `world` fresh processes."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        context.Process(target=rank_main, args=(pipes[rank][1], rank, world, port, *args)) for rank in range(world)
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
    from rlcore.models import build_fresh_model

    stages = [0, 1, 2, 3] if args.dtype == "float32" else [1, 2, 3]  # 0 would accumulate in bfloat16 and is refused
    sizes = {"hidden_size": 66, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate_size": 63}
    with tempfile.TemporaryDirectory() as folder:
        model = str(build_fresh_model(folder, "0123456789=+", seed=0, max_len=64, **sizes))
        tables = {world: on_ranks(world, model, args.dtype, stages) for world in args.ranks}
    reference, norm, _ = tables[args.ranks[0]][stages[0], MICRO_BATCH_TOKENS[0]]
    largest = max(float(np.abs(g).max()) for g in reference.values())
    print(f"{args.dtype}; reference gradient: norm {norm:.5f}, largest entry {largest:.5f}")
    print("| ranks | ZeRO | micro-batches per rank | largest difference | norm |\n| --- | --- | --- | --- | --- |")
    worst = 0.0
    for world, table in tables.items():
        for (stage, _), (gradients, its_norm, count) in table.items():
            difference = max(float(np.abs(gradients[name] - reference[name]).max()) for name in reference)
            worst = max(worst, difference)
            print(f"| {world} | {stage} | {count} | {difference:.1e} | {its_norm:.5f} |")
    print(f"largest of all: {worst:.1e}")


if __name__ == "__main__":
    main()
