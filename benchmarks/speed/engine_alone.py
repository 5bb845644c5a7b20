"""Processor time of the engine alone on the loads of `peers.py`: a step's requests from their
queueing to the last trajectory, on one thread.

    python -m benchmarks.speed.engine_alone --folder DIR [--loads short] [--rounds 4]

Prints the processor time of each round, which other jobs lengthen less than its wall time, and of a
decode step by the number of its requests. The digest is of all tokens and log-probs: two versions
of the code that should sample the same bits must print the same one.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read at the first import of torch

import numpy as np

from benchmarks.peers.peer_loads import LOADS, job_of
from rlcore.interfaces import RolloutEngine
from rlcore.models.text import load_tokenizer
from rlcore.rollout.specs import ActorSpec, EngineJob, start_engine
from rlcore.testing.records import make_sampling
from rlcore.types import Request

SIZES = ((1, 8), (9, 32), (33, 128), (129, 512))
Steps = list[tuple[int, float]]  # (tokens, processor seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--loads", nargs="+", default=["short", "long-tailed"])
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for load in LOADS:
        if load.key in args.loads:
            measure(job_of(load, args.folder, []), args.rounds)


def measure(job: Mapping[str, Any], rounds: int) -> None:
    """Start an engine, print the table of a load."""
    actor = ActorSpec(max_num_seqs=512, kv_cache_gib=0.25)  # as the quickstart has it
    engine = start_engine(EngineJob(actor, "bf16-0", job["model"], job["max_len"], logprobs_k=20))
    digest, steps = hashlib.sha256(), []
    drain(engine, requests(job, rounds), digest)  # warm
    for round_ in range(rounds):
        begun = time.process_time()
        found = drain(engine, requests(job, round_), digest)
        spent, tokens = time.process_time() - begun, sum(n for n, _ in found)
        us = spent / tokens * 1e6
        print(f"{job['load']}: {tokens} tokens, {spent:.2f} s of CPU, {us:.0f} us a token")
        steps += found
    for low, high in SIZES:
        if its := [s for n, s in steps if low <= n <= high]:
            found_ms = f"{statistics.median(its) * 1e3:.2f} ms, at best {min(its) * 1e3:.2f}"
            print(f"  a step of {low} to {high} requests: {found_ms}")
    print(f"  digest {digest.hexdigest()[:16]}")
    engine.close()


def requests(job: Mapping[str, Any], round_: int) -> list[Request]:
    """Those of one step."""
    tokenizer = load_tokenizer(job["model"])
    spec = make_sampling(max_new_tokens=job["max_tokens"], logprobs_k=20)
    groups = range(round_ * job["groups"], (round_ + 1) * job["groups"])
    asked = [job["problems"][g % len(job["problems"])]["prompt"] for g in groups]
    prompts = [np.array(tokenizer.encode(text), np.int32) for text in asked]
    return [
        Request(g, i, "bench", prompt, spec, seed=g * job["samples"] + i)
        for g, prompt in zip(groups, prompts, strict=True)
        for i in range(job["samples"])
    ]


def drain(engine: RolloutEngine, batch: list[Request], digest: Any) -> Steps:
    """Decode requests to their end."""
    engine.add(batch)
    steps: Steps = []
    done = []
    while engine.unfinished():
        begun = time.process_time()
        done += engine.step()
        steps.append((engine.load_of_step().tokens, time.process_time() - begun))
    for t in sorted(done, key=lambda t: (t.group_id, t.sample_index)):
        for array in (t.token_ids, t.logp_inf, t.topk_logp):
            digest.update(array.tobytes())
    return steps


if __name__ == "__main__":
    main()
