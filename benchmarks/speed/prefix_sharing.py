"""What computing a group's prompt once saves in the learner.

    python -m benchmarks.speed.prefix_sharing [--rounds 3] [--threads 1] [--loads short,...]
        [--out FILE]

Each load is groups of equal prompts with random responses on a random model, in the learner's own
micro-batches, with its own head pass: forward and backward of all of them, with
`learner.share_prefix=off` and `auto` in turn. The shortest of the rounds counts, because other load
can only slow a round down. The difference is that of the whole gradient, as a share of its length.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from rlcore.attention.specs import SparseSpec
from rlcore.learner.build import share_prefixes
from rlcore.learner.lm_head import HeadSpec
from rlcore.learner.packing import MicroBatch, PassCosts, pack
from rlcore.learner.policy import Policy, load_causal_lm
from rlcore.learner.sequences import TokenSequence
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.types import TokenScores

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz =+-"
HEAD = HeadSpec(1.0, 1024)
MODELS = {
    "1.6M": {"hidden_size": 192, "heads": 6, "intermediate_size": 512},
    "0.6M": {"layers": 3, "heads": 4},
    "135M": {
        "hidden_size": 576,
        "layers": 30,
        "heads": 9,
        "kv_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    },
}


class Load(NamedTuple):
    """Groups of samples. `spread`: the shortest response as a share of the longest. `blocks`: pages
    of 16 tokens that each query attends to; None: dense attention."""

    model: str
    groups: int
    samples: int
    prompt: int
    response: int
    spread: float
    micro_batch_tokens: int
    blocks: int | None = None


LOADS = {
    "short": Load("1.6M", 64, 8, 7, 8, 1.0, 1024),
    "middle": Load("0.6M", 16, 8, 60, 120, 1.0, 4096),
    "long prompts": Load("0.6M", 16, 8, 300, 120, 1.0, 4096),
    "unequal": Load("0.6M", 16, 8, 60, 384, 0.02, 4096),
    "long responses": Load("0.6M", 16, 8, 8, 384, 1.0, 4096),
    "135M": Load("135M", 4, 8, 45, 16, 1.0, 1024),
    "long prompts in 8 pages": Load("0.6M", 16, 8, 300, 120, 1.0, 4096, blocks=8),
    "short answers in 8 pages": Load("0.6M", 16, 8, 300, 8, 1.0, 4096, blocks=8),
}


class Result(NamedTuple):
    """Of one load, plain and shared."""

    seconds: tuple[float, float]
    positions: tuple[int, int]
    shared: bool
    difference: float


def episodes_of(load: Load) -> list[tuple[TokenSequence, ...]]:
    rng = np.random.default_rng(0)
    episodes = []
    for _ in range(load.groups):
        prompt = rng.integers(5, 40, load.prompt).tolist()
        for _ in range(load.samples):
            least = max(1, int(load.spread * load.response))
            length = int(rng.integers(least, load.response + 1))
            answer = rng.integers(5, 40, length).tolist()
            episodes.append((TokenSequence.of_answer(prompt, answer),))
    return episodes


def step(policy: Policy, micro: Sequence[MicroBatch], tokens: int) -> float:
    """Seconds of all forward and backward passes; the gradient is left in the parameters."""
    policy.zero_grad()
    start = time.process_time()
    for mb in micro:
        scores = TokenScores(*policy(mb, None, HEAD)[1:])
        (scores.logp.sum() / tokens).backward()
    return time.process_time() - start


def gradient(policy: Policy) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def measure(load: Load, folder: Path, rounds: int) -> Result:
    spec = FreshModelSpec(**MODELS[load.model])
    path = build_fresh_model(folder / load.model, ALPHABET, spec, seed=0, max_len=512)
    rule = None if load.blocks is None else SparseSpec(blocks=load.blocks)
    lm = load_causal_lm(path, "float32", "sdpa", sparse=rule is not None)
    reason = share_prefixes(lm, rule)
    assert reason is None, reason
    costs, policy, episodes = PassCosts.of(lm), Policy(lm.train(), rule), episodes_of(load)
    tokens = sum(s.scored for (s,) in episodes)
    ways = [pack(episodes, load.micro_batch_tokens, "sorted", costs=c) for c in (None, costs)]
    seconds: list[list[float]] = [[], []]
    gradients = []
    for i in range(rounds + 1):  # the first warms up
        for way, micro in enumerate(ways):
            seconds[way].append(step(policy, micro, tokens))
            if i == 0:
                gradients.append(gradient(policy))
    plain, shared = gradients
    return Result(
        seconds=(min(seconds[0][1:]), min(seconds[1][1:])),
        positions=(sum(m.tokens for m in ways[0]), sum(m.tokens for m in ways[1])),
        shared=any(mb.shared is not None for mb in ways[1]),
        difference=float((shared - plain).norm() / plain.norm()),
    )


def row(name: str, load: Load, result: Result) -> str:
    lengths = f"{load.response}" if load.spread == 1 else f"1 to {load.response}"
    (plain, shared), (all_positions, positions) = result.seconds, result.positions
    cells = [
        name,
        load.model,
        f"{load.groups} x {load.samples}",
        f"{load.prompt}, {lengths}",
        f"{all_positions}",
        f"{positions}" if result.shared else "plain is chosen",
        f"{plain:.2f}",
        f"{shared:.2f}",
        f"{plain / shared:.2f}",
        f"{result.difference:.0e}",
    ]
    return "| " + " | ".join(cells) + " |"


HEADER = (
    "| load | model | groups x samples | prompt, response | positions, plain | shared | plain, s "
    "| shared, s | ratio | gradients differ by |\n" + "| --- " * 10 + "|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lines = [HEADER]
    print(HEADER, flush=True)
    for name in args.loads.split(","):
        with tempfile.TemporaryDirectory() as folder:
            lines.append(row(name, LOADS[name], measure(LOADS[name], Path(folder), args.rounds)))
        print(lines[-1], flush=True)
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
