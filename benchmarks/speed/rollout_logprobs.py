"""Throughput cost of storing the top 20 log-probs of every token, for an engine with a tiny model
or with a given one.

    python -m benchmarks.speed.rollout_logprobs [--model FOLDER] [--rounds 5] [--tokens 64]
    python -m benchmarks.speed.rollout_logprobs --host [--sequences 64 256] [--tokens 256]

Prints tokens per second at k = -1 (no log-probs), 0 (the sampled token's) and 20 for several batch
sizes, and the throughput lost against k = -1. Settings alternate, and the best round of each
counts, because other load on the machine can only slow a round down; CPU time is shown as well for
the same reason.

--host starts no engine: it prints the processor microseconds a token from a step's rows to records,
with rows that are cut for every request of every step, and with rows that are kept
(`rlcore/rollout/engines/vllm/kept_rows.py`). What a GPU's copies cost is not in it.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections import defaultdict

import numpy as np

from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.testing.records import make_sampling
from rlcore.types import Request

KS = (-1, 0, 20)
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ =+-"
MAX_LEN = 512


def requests(sequences: int, tokens: int, k: int) -> list[Request]:
    """Groups of eight samples of short prompts."""
    spec = make_sampling(max_new_tokens=tokens, logprobs_k=k)
    prompts = [np.array([5, 6, 7, 8 + g % 20], np.int32) for g in range(sequences // 8)]
    return [
        Request(g, i, "bench", p, spec, seed=g * 8 + i)
        for g, p in enumerate(prompts)
        for i in range(8)
    ]


def run(engine, batch: list[Request]) -> tuple[float, float]:
    """Tokens per wall second and per CPU second, from queueing a batch to its last trajectory."""
    wall, cpu = time.perf_counter(), time.process_time()
    engine.add(batch)
    tokens = 0
    while engine.unfinished():
        tokens += sum(len(t.logp_inf) for t in engine.step())
    return tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu)


def host(sequences: int, tokens: int, k: int, kept: bool) -> float:
    """Microseconds a token of records whose lengths are spread evenly up to `tokens`."""
    import torch
    from vllm.v1.outputs import LogprobsTensors

    from rlcore.rollout.engines.vllm.kept_rows import KeptLogprobs, RowStore
    from rlcore.rollout.segments import Draw

    draws = [Draw(r, str(i), tokens, 0) for i, r in enumerate(requests(sequences, tokens, k))]
    ids = torch.arange(sequences)[:, None].repeat(1, max(k, 0) + 1)
    KeptLogprobs.store = RowStore(ids.device)
    made = (KeptLogprobs if kept else LogprobsTensors)(ids, -ids.float(), ids[:, 0])
    sampled, began = 0, time.process_time()
    for _ in range(tokens):
        rows = made.tolists() if k >= 0 else None
        for row, draw in enumerate(draws):
            if len(draw.tokens) == (row + 1) * tokens // sequences:
                continue
            its = rows and rows.slice_request(row, 1)
            draw.extend([row], its if kept or not its else its[:2])
            sampled += 1
            if len(draw.tokens) == (row + 1) * tokens // sequences:
                draw.finish("length", "a", "bf16")
    return 1e6 * (time.process_time() - began) / sampled


def print_host(args: argparse.Namespace) -> None:
    """The table of `host`, the best of some rounds."""
    print(f"{'sequences':>9} {'k':>3} {'rows':>10} {'us/token':>9}")
    for n in args.sequences:
        for k, kept in ((-1, False), (0, False), (0, True), (20, False), (20, True)):
            best = min(host(n, args.tokens, k, kept) for _ in range(args.rounds))
            rows = "none" if k < 0 else "kept" if kept else "every step"
            print(f"{n:>9} {k:>3} {rows:>10} {best:>9.2f}")


def measure(folder: str, args: argparse.Namespace) -> None:
    """Start one engine and print the table."""
    from rlcore.rollout.specs import ActorSpec, EngineJob, start_engine

    actor = ActorSpec(max_num_seqs=512)
    begun = time.perf_counter()
    engine = start_engine(EngineJob(actor, "bench-0", folder, MAX_LEN, logprobs_k=max(KS)))
    print(f"engine start {time.perf_counter() - begun:.1f} s")
    rates: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for _ in range(args.rounds):
        for n in args.sequences:
            for k in KS:
                rates[n, k].append(run(engine, requests(n, args.tokens, k)))
    names = f"{'sequences':>9} {'k':>3} {'tok/s':>8} {'tok/CPU s':>10}"
    print(f"{names} {'cost, wall':>11} {'cost, CPU':>10}")
    for n in args.sequences:
        base = [max(r) for r in zip(*rates[n, -1])]
        for k in KS:
            wall, cpu = (max(r) for r in zip(*rates[n, k]))
            costs = f"{1 - wall / base[0]:>10.1%} {1 - cpu / base[1]:>9.1%}"
            print(f"{n:>9} {k:>3} {wall:>8.0f} {cpu:>10.0f} {costs}")
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak resident memory {rss:.2f} GiB, {actor.kv_cache_gib:g} GiB of it KV cache")
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a Hugging Face folder; by default a tiny model is made")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="length limit of a response")
    parser.add_argument("--sequences", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--host", action="store_true", help="from rows to records alone")
    args = parser.parse_args()
    if args.host:
        return print_host(args)
    if args.model is not None:
        return measure(args.model, args)
    with tempfile.TemporaryDirectory() as folder:
        build_fresh_model(folder, ALPHABET, FreshModelSpec(), seed=0, max_len=MAX_LEN)
        measure(folder, args)


if __name__ == "__main__":
    main()
