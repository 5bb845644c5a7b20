"""What storing the top 20 log-probs of every token costs a whole engine on a tiny model.

    python benchmarks/rollout_logprobs.py [--rounds 5] [--tokens 64]

Prints tokens per second at k = -1 (no log-probs), 0 (the sampled token's) and 20, for several batch sizes, and the
share of throughput that each costs against none. The settings take turns and the best round of each counts, since
other load on the machine only ever slows a round; CPU seconds of the process stand beside wall time for that reason.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections import defaultdict

import numpy as np

from rlcore.models import build_fresh_model
from rlcore.types import Request, SamplingSpec

KS = (-1, 0, 20)
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ =+-"
SHAPE = dict(hidden_size=128, layers=4, heads=4, kv_heads=2, head_dim=32, intermediate_size=384, max_len=512)


def requests(sequences: int, tokens: int, k: int) -> list[Request]:
    spec = SamplingSpec(max_new_tokens=tokens, logprobs_k=k)
    prompts = [np.array([5, 6, 7, 8 + g % 20], np.int32) for g in range(sequences // 8)]
    return [Request(g, i, "bench", p, spec, seed=g * 8 + i) for g, p in enumerate(prompts) for i in range(8)]


def run(engine, batch: list[Request]) -> tuple[float, float]:
    """Tokens per wall second and per CPU second of one batch, from queueing to the last trajectory."""
    wall, cpu = time.perf_counter(), time.process_time()
    engine.add(batch)
    tokens = 0
    while engine.unfinished():
        tokens += sum(len(t.response_ids) for t in engine.step())
    return tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu)


def own_path(folder: str, args: argparse.Namespace) -> None:
    from rlcore.rollout.vllm_engine import VllmEngine

    begun = time.perf_counter()
    engine = VllmEngine(model_path=folder, actor_id="bench", max_len=512, max_num_seqs=512, kv_cache_gib=1.0)
    print(f"engine start {time.perf_counter() - begun:.1f} s")
    rates: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for _ in range(args.rounds):
        for n in args.sequences:
            for k in KS:
                rates[n, k].append(run(engine, requests(n, args.tokens, k)))
    print(f"{'sequences':>9} {'k':>3} {'tok/s':>8} {'tok/CPU s':>10} {'cost, wall':>11} {'cost, CPU':>10}")
    for n in args.sequences:
        base = [max(r) for r in zip(*rates[n, -1])]
        for k in KS:
            wall, cpu = (max(r) for r in zip(*rates[n, k]))
            print(f"{n:>9} {k:>3} {wall:>8.0f} {cpu:>10.0f} {1 - wall / base[0]:>10.1%} {1 - cpu / base[1]:>9.1%}")
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"resident at most {rss:.2f} GiB with 1 GiB of KV cache")
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="length limit of a response")
    parser.add_argument("--sequences", type=int, nargs="+", default=[128, 256, 512])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        build_fresh_model(folder, ALPHABET, seed=0, **SHAPE)
        own_path(folder, args)


if __name__ == "__main__":
    main()
