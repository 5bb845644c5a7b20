"""Small models, made-up groups, and functions run on real ranks in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.models import build_fresh_model
from rlcore.types import Group, Trajectory

ALPHABET = "0123456789=+"
VOCAB = 15
DEADLINE_S = 600  # far more than needed: two ranks on a busy machine wait for each other


def small_model(folder: Path, *, hidden: int = 66, tie: bool = True) -> str:
    """Sizes that two ranks do not divide evenly."""
    sizes = {"layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate_size": 63, "max_len": 64}
    return str(build_fresh_model(folder, ALPHABET, seed=3, hidden_size=hidden, tie_embeddings=tie, **sizes))


def make_groups(
    count: int, *, samples: int = 3, seed: int = 0, k: int = 4, version: int = 0, first_id: int = 0
) -> list[Group]:
    """Groups with random tokens, lengths 1 to 9, log-probs near those of a fresh model, and random rewards."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(first_id, first_id + count):
        prompt = rng.integers(3, VOCAB, rng.integers(2, 7)).astype(np.int32)
        trajectories = []
        for i in range(samples):
            t = int(rng.integers(1, 10))
            top = np.argsort(rng.random((t, VOCAB)))[:, :k].astype(np.int32)
            trajectories.append(
                Trajectory(
                    prompt_ids=prompt,
                    response_ids=rng.integers(3, VOCAB, t).astype(np.int32),
                    logp_inf=(-2.7 + 0.3 * rng.standard_normal(t)).astype(np.float32),
                    topk_ids=top,
                    topk_logp=np.log(np.full((t, k), 0.1, np.float32)),
                    token_version=np.full(t, version, np.int32),
                    actor_id="a",
                    actor_kind="bf16",
                    group_id=g,
                    prompt_id=f"p{g}",
                    sample_index=i,
                    finish_reason="stop",
                    score_status="ok",
                    reward=float(rng.random()),
                )
            )
        groups.append(Group(g, f"p{g}", version, trajectories, arrival_version=version))
    return groups


def _rank_main(
    pipe: Any, function: Callable[..., Any], rank: int, world: int, port: int, args: tuple[Any, ...]
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        pipe.send(("ok", function(rank, world, port, *args)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


def on_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(rank, world, port, *args)` in `world` fresh processes; their results in order of rank."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(theirs, function, rank, world, port, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(DEADLINE_S), f"rank {rank} of {world} said nothing for {DEADLINE_S} s"
            status, value = pipe.recv()
            assert status == "ok", f"rank {rank} of {world}:\n{value}"
            results.append(value)
        return results
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
