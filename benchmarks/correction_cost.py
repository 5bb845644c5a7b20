"""What a correction adds to a learner step, on a model of real vocabulary: real DeepSpeed, whole steps, in turns.

    python benchmarks/correction_cost.py [--hidden 256] [--layers 4] [--vocab 151936] [--sequences 8] [--rounds 7]

Every variant takes the same batch, in several micro-batches. Three kinds of step:

- `first`: the first step of a phase of several, p_ref's pass included (`ref_pass=always`): every method pays it.
- `later`: the second step of such a phase, without p_ref's pass. A correction towards p_new scores the batch anew.
- `alone`: a phase of one step as runs have it (`ref_pass=auto`). Methods with statistics over the batch need p_ref's
  pass, the others do not; with one micro-batch a rank (--micro 100000) none does.

The kinds run one after another; a round runs every variant of a kind once, in an order that changes. A share is the
median over rounds of (variant - none) / none within the kind; `over none alone` compares the medians with `none` in a
phase of one step, the cheapest step there is.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import machine, table

CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "tis": {"tis": {}},
    "tis.adjusted": {"tis": {"adjusted": True}},
    "ais": {"ais": {}},
    "dvp": {"dvp": {}},
    "dvp+mis+veto": {"dvp": {}, "mis": {"low": 0.5, "high": 2.0}, "veto": {}},
    "jackpot (ref, k=20)": {"jackpot": {"target": "ref"}},
    "jackpot (new, k=20)": {"jackpot": {"target": "new"}},
}
LATER = ("none", "tis.adjusted", "jackpot (new, k=20)")
KINDS = {"first": CORRECTIONS, "later": LATER, "alone": CORRECTIONS}
VARIANTS = {f"{kind}: {name}": (kind, name) for kind, names in KINDS.items() for name in names}
BASE = "alone: none"


def groups(args: argparse.Namespace) -> list[Any]:
    """Two groups of random tokens with plausible top-k log-probs."""
    from rlcore.types import Group, Trajectory

    rng = np.random.default_rng(0)
    made: list[list[Any]] = [[], []]
    for i in range(args.sequences):
        t, k = args.tokens, args.topk
        logits = np.sort(rng.normal(size=(t, k)).astype(np.float32), axis=1)[:, ::-1]
        topk = logits - np.log(np.exp(logits).sum(1, keepdims=True)) - 2.0
        made[i % 2].append(
            Trajectory(
                prompt_ids=rng.integers(0, args.vocab, 16).astype(np.int32),
                response_ids=rng.integers(0, args.vocab, t).astype(np.int32),
                logp_inf=np.full(t, -np.log(args.vocab), np.float32),
                topk_ids=rng.integers(0, args.vocab, (t, k)).astype(np.int32),
                topk_logp=np.ascontiguousarray(topk),
                token_version=np.zeros(t, np.int32),
                actor_id="a",
                actor_kind="bf16",
                group_id=i % 2,
                prompt_id=f"t/train/{i % 2}",
                sample_index=i // 2,
                finish_reason="stop",
                score_status="ok",
                reward=float(rng.integers(0, 2)),
            )
        )
    return [Group(g, f"t/train/{g}", 0, members) for g, members in enumerate(made)]


def model(folder: Path, args: argparse.Namespace) -> str:
    from rlcore.models import build_fresh_model

    return str(
        build_fresh_model(
            folder,
            "0123456789",
            seed=0,
            hidden_size=args.hidden,
            layers=args.layers,
            heads=args.hidden // 64,
            kv_heads=max(1, args.hidden // 128),
            head_dim=64,
            intermediate_size=3 * args.hidden,
            max_len=2048,
            vocab_size=args.vocab,
        )
    )


def serve(args: argparse.Namespace) -> None:
    """One variant in a process of its own: a step for every line on standard input, its seconds on standard output."""
    from rlcore.learner.learner import LearnerRank

    kind, name = VARIANTS[args.serve]
    rank = LearnerRank(
        model_path=args.model,
        master_port=0,
        lr=1e-5,
        corrections=CORRECTIONS[name],
        logprobs_k=args.topk,
        ref_pass="always" if kind == "first" else "auto",
        micro_batch_tokens=args.micro,
        threads=args.threads,
    )
    batch = groups(args)
    print("ready", flush=True)
    for step, _ in enumerate(sys.stdin):
        if kind == "later":
            rank.begin_phase([batch, batch])
            rank.train_step(2 * step)
        begin = time.process_time()
        if kind != "later":
            rank.begin_phase([batch])
        rank.train_step(2 * step + 1)
        print(time.process_time() - begin, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {
        "hidden": 256,
        "layers": 4,
        "vocab": 151936,
        "sequences": 8,
        "tokens": 128,
        "topk": 20,
        "rounds": 7,
        "threads": 1,
        "micro": 512,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", nargs="+", default=list(KINDS), choices=list(KINDS), help="kinds of step")
    parser.add_argument("--serve", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--model", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        return serve(args)
    with tempfile.TemporaryDirectory() as folder:
        path = model(Path(folder) / "model", args)
        seconds: dict[str, list[float]] = {}
        for kind in args.steps:
            seconds |= _rounds([v for v in VARIANTS if VARIANTS[v][0] == kind], path, args.rounds)
    rows = []
    for variant, taken in seconds.items():
        kind, name = VARIANTS[variant]
        shares = [(a - b) / b for a, b in zip(taken, seconds[f"{kind}: none"])]
        rows.append(
            {
                "step": kind,
                "correction": name,
                "CPU s per step (median)": statistics.median(taken),
                "added share (median)": statistics.median(shares),
                "min": min(shares),
                "max": max(shares),
            }
        )
        if BASE in seconds:
            rows[-1]["over none alone"] = statistics.median(taken) / statistics.median(seconds[BASE]) - 1
    parameters = args.vocab * args.hidden + args.layers * (args.hidden * args.hidden * 12)
    print(
        f"\nLearner step of {args.sequences * args.tokens} response tokens, about {parameters / 1e6:.0f}M parameters, "
    )
    print(f"vocabulary {args.vocab}, k={args.topk}, micro-batches of {args.micro} tokens, ")
    print(f"{args.rounds} rounds; {machine()}\n")
    print(table(rows))


def _rounds(names: list[str], path: str, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each round's step, by variant; one process a variant, all alive together."""
    workers = {name: _start(name, path) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds + 1):
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            taken = _step(workers[name])
            if round_:  # the first round warms allocators up
                seconds[name].append(taken)
    for worker in workers.values():
        worker.stdin.close()
        worker.wait(60)
    return seconds


def _start(name: str, path: str) -> subprocess.Popen[str]:
    worker = subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "--serve", name, "--model", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    while (line := worker.stdout.readline()) and line.strip() != "ready":
        pass
    if not line:
        raise RuntimeError(f"the process of variant {name!r} ended at start")
    return worker


def _step(worker: subprocess.Popen[str]) -> float:
    worker.stdin.write("\n")
    worker.stdin.flush()
    while True:
        line = worker.stdout.readline()
        if not line:
            raise RuntimeError("a variant's process ended")
        try:
            return float(line)
        except ValueError:
            continue  # something a library printed


if __name__ == "__main__":
    main()
