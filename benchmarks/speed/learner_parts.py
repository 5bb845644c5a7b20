"""What each part of a learner step takes on a real model: the passes through the layers and the
LM head, the top k, and the corrections themselves.

    python -m benchmarks.speed.learner_parts --model FOLDER [--sequences 8] [--tokens 64]
        [--rounds 5]

One process without DeepSpeed; random responses. Every round measures every part once, in an order
that changes; shown is the median. The reference pass is a forward pass through layers and head
without gradients, the update one with gradients and its backward pass, without the optimizer.
`correction_cost.py` measures the whole steps that a correction needs, with its reference pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import machine, table
from benchmarks.speed.correction_cost import CORRECTIONS, random_trajectory
from rlcore.corrections.dvp import DvpSpec
from rlcore.corrections.numerics import ONE_RANK
from rlcore.corrections.pipeline import build
from rlcore.learner.batch import PolicyScores, StepBatch, build_batch, observed
from rlcore.learner.lm_head import HeadSpec, head_pass
from rlcore.learner.packing import MicroBatch, pack
from rlcore.learner.policy import Policy, load_causal_lm
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.testing.records import make_group
from rlcore.types import Group, TokenScores

Part = Callable[[], object]
CHUNK = 1024
LAYERS, HEAD = "layers, no gradient", "head: log p, entropy"
UPDATE = "update: layers and head, forward and backward"


def alternated(parts: Mapping[str, Part], rounds: int) -> dict[str, float]:
    """Median seconds of each part; a round runs each once, beginning with another one."""
    names = list(parts)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds + 1):
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            begun = time.perf_counter()
            parts[name]()
            if round_:  # the first round warms allocators up
                taken[name].append(time.perf_counter() - begun)
    return {name: statistics.median(values) for name, values in taken.items()}


def passes(policy: Policy, mb: MicroBatch, batch: StepBatch) -> dict[str, Part]:
    """The passes of a step over one micro-batch."""
    assert batch.sent.topk_ids_inf is not None
    ids = mb.flat(batch.sent.topk_ids_inf)
    plain = HeadSpec(1.0, CHUNK)
    top = replace(plain, topk=ids.shape[1])
    with torch.no_grad():
        hidden = policy.hidden(mb)
    weight = policy.head.weight

    def quietly(run: Callable[[], object]) -> Part:
        def part() -> object:
            with torch.no_grad():
                return run()

        return part

    def head(spec: HeadSpec, at: Tensor | None) -> Part:
        return quietly(lambda: head_pass(hidden, weight, mb.targets, spec, at))

    def update() -> None:
        policy.zero_grad()
        policy(mb, ids, top)[1].sum().backward()

    return {
        LAYERS: quietly(lambda: policy.hidden(mb)),
        HEAD: head(plain, None),
        f"{HEAD}, at the actor's top {ids.shape[1]}": head(plain, ids),
        f"{HEAD}, both sides' top {ids.shape[1]}": head(top, ids),
        f"{HEAD}, safe set": head(replace(plain, safe_set_rho=DvpSpec().rho), None),
        "reference pass: layers and head, both top k": quietly(lambda: policy(mb, ids, top)),
        UPDATE: update,
    }


@torch.no_grad()
def corrections(policy: Policy, mb: MicroBatch, batch: StepBatch) -> dict[str, Part]:
    """Weights and masks of each correction, with metrics of the mismatch left out, and those
    alone."""
    assert batch.sent.topk_ids_inf is not None
    ids = mb.flat(batch.sent.topk_ids_inf)
    spec = HeadSpec(1.0, CHUNK, topk=ids.shape[1], safe_set_rho=DvpSpec().rho)
    fields = policy(mb, ids, spec)[1:]
    scores = PolicyScores.of(mb, TokenScores(*fields), batch.sent.mask.shape[1])
    step = observed(batch.sent, (0, 0), batch.sent.advantages, scores, scores)

    def part(chosen: str, measure: bool) -> Part:
        pipeline = build(CORRECTIONS[chosen], 0, ObjectiveSpec())
        return lambda: pipeline.correct(step, ONE_RANK, measure=measure)

    found = {f"correction {name}": part(name, False) for name in CORRECTIONS}
    return {"metrics of the mismatch, and no correction": part("none", True), **found}


def _groups(args: argparse.Namespace) -> list[Group]:
    rng = np.random.default_rng(0)
    drawn = [random_trajectory(rng, i, args) for i in range(args.sequences)]
    rewards = [float(i % 3 == 0) for i in range(args.sequences)]
    return [make_group(drawn[half::2], rewards[half::2]) for half in range(2)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="sampled tokens of a response")
    parser.add_argument("--topk", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    policy = Policy(load_causal_lm(args.model, "float32", "sdpa").train())
    args.vocab = policy.head.weight.shape[0]
    batch = build_batch(_groups(args), with_topk=True, device=torch.device("cpu"))
    (mb,) = pack(batch.episodes, 1 << 30, "sorted")
    parts = passes(policy, mb, batch) | corrections(policy, mb, batch)
    found = alternated(parts, args.rounds)
    print(
        f"\n{batch.tokens} sampled tokens in {mb.input_ids.numel()} positions, vocabulary "
        f"{args.vocab}, {args.threads} threads, {args.rounds} rounds; {machine()}\n"
    )
    rows = [
        {"part": n, "ms": 1e3 * s, "of the update": s / found[UPDATE]} for n, s in found.items()
    ]
    print(table(rows))


if __name__ == "__main__":
    main()
