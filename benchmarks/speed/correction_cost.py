"""Cost that each correction adds to a learner step, on a model with a realistic vocabulary.

    python -m benchmarks.speed.correction_cost [--hidden 256] [--layers 4] [--vocab 151936]
                                         [--sequences 8] [--rounds 7] [--only NAME ...]

Whole steps with DeepSpeed. Every variant takes the same batch, in several micro-batches. Three
kinds of step are measured:

- `first`: the first step of a phase of several, with the pass for p_ref (`ref_pass=always`). Every
  method pays for that pass.
- `later`: the second step of such a phase, without that pass. A correction towards p_new scores the
  batch again.
- `alone`: a phase of one step as in a run (`ref_pass=auto`). Methods with statistics over the batch
  need the pass for p_ref, the others do not; with one micro-batch a rank (--micro 100000) none
  does.

The kinds run one after another. A round runs every variant of a kind once, in an order that
changes. A share is the median over rounds of (variant - none) / none within the kind. `over none
alone` compares the medians with `none` in a phase of one step, the cheapest step.
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

from benchmarks.harness import again, machine, table
from rlcore.corrections.ais import AisSpec
from rlcore.corrections.centre import CentreSpec
from rlcore.corrections.dvp import DvpSpec
from rlcore.corrections.jackpot import JackpotSpec
from rlcore.corrections.mis import MisSpec
from rlcore.corrections.specs import CorrectionSpec
from rlcore.corrections.tis import TisSpec
from rlcore.corrections.veto import VetoSpec
from rlcore.types import Group, Trajectory

CORRECTIONS: dict[str, dict[str, CorrectionSpec]] = {
    "none": {},
    "tis": {"tis": TisSpec()},
    "centre": {"centre": CentreSpec()},
    "centre+tis": {"centre": CentreSpec(), "tis": TisSpec()},
    "tis.adjusted": {"tis": TisSpec(adjusted=True)},
    "ais": {"ais": AisSpec()},
    "dvp": {"dvp": DvpSpec()},
    "dvp+mis+veto": {"dvp": DvpSpec(), "mis": MisSpec(), "veto": VetoSpec()},
    "jackpot (ref, k=20)": {"jackpot": JackpotSpec(target="ref")},
    "jackpot (new, k=20)": {"jackpot": JackpotSpec(target="new")},
}
LATER = ("none", "tis", "centre+tis", "tis.adjusted", "jackpot (new, k=20)")
KINDS = {"first": CORRECTIONS, "later": LATER, "alone": CORRECTIONS}
VARIANTS = {f"{kind}: {name}": (kind, name) for kind, names in KINDS.items() for name in names}
BASE = "alone: none"
PROMPT = 16  # tokens


def groups(args: argparse.Namespace) -> list[Group]:
    """Two groups of random tokens with plausible top-k log-probs and random rewards."""
    from rlcore.testing.records import make_group

    rng = np.random.default_rng(0)
    drawn: list[list[tuple[Trajectory, float]]] = [[], []]
    for i in range(args.sequences):
        drawn[i % 2].append((random_trajectory(rng, i, args), float(rng.integers(0, 2))))
    return [make_group([t for t, _ in one], [r for _, r in one]) for one in drawn]


def random_trajectory(rng: np.random.Generator, i: int, args: argparse.Namespace) -> Trajectory:
    from rlcore.testing.records import make_trajectory

    count, k = args.tokens, args.topk
    logits = np.sort(rng.normal(size=(count, k)).astype(np.float32), axis=1)[:, ::-1]
    topk = logits - np.log(np.exp(logits).sum(1, keepdims=True)) - 2.0
    prompt = rng.integers(0, args.vocab, PROMPT).tolist()
    response = rng.integers(0, args.vocab, count).tolist()
    return make_trajectory(
        i % 2,
        i // 2,
        turns=[(prompt, response)],
        logp_inf=np.full(count, -np.log(args.vocab), np.float32),
        topk_ids=rng.integers(0, args.vocab, (count, k)).astype(np.int32),
        topk_logp=np.ascontiguousarray(topk),
    )


def model(folder: Path, args: argparse.Namespace) -> str:
    """Write a fresh model of the requested size; its folder."""
    from rlcore.models.fresh import build_fresh_model
    from rlcore.models.specs import FreshModelSpec

    spec = FreshModelSpec(
        hidden_size=args.hidden,
        layers=args.layers,
        heads=args.hidden // 64,
        kv_heads=max(1, args.hidden // 128),
        head_dim=64,
        intermediate_size=3 * args.hidden,
        vocab_size=args.vocab,
    )
    return str(build_fresh_model(folder, "0123456789", spec, seed=0, max_len=2048))


def learner_rank(kind: str, name: str, args: argparse.Namespace) -> Any:
    """One DeepSpeed rank with the correction of a variant."""
    from rlcore.learner.rank import LearnerRank
    from rlcore.learner.specs import LearnerJob, LearnerSpec, RankPlace
    from rlcore.objectives.specs import ObjectiveSpec
    from rlcore.testing.records import make_sampling

    job = LearnerJob(
        model_path=args.model,
        learner=LearnerSpec(
            lr=1e-5,
            ref_pass="always" if kind == "first" else "auto",
            micro_batch_tokens=args.micro,
            num_cpus=args.threads,
        ),
        objective=ObjectiveSpec(),
        corrections=CORRECTIONS[name],
        sampling=make_sampling(logprobs_k=args.topk),
        total_steps=1000,
        run_seed=0,
        pad_id=0,
    )
    return LearnerRank(job, RankPlace(0, 1, "127.0.0.1", 0, timeout_s=600))


def serve(args: argparse.Namespace) -> None:
    """One variant in its own process: one step for each line on standard input, its CPU seconds on
    standard output."""
    kind, name = VARIANTS[args.serve]
    rank = learner_rank(kind, name, args)
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
    parser.add_argument(
        "--steps", nargs="+", default=list(KINDS), choices=list(KINDS), help="kinds of step"
    )
    parser.add_argument("--only", nargs="+", help="corrections, in addition to none")
    parser.add_argument("--serve", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--model", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        return serve(args)
    with tempfile.TemporaryDirectory() as folder:
        path = model(Path(folder) / "model", args)
        seconds: dict[str, list[float]] = {}
        for kind in args.steps:
            asked = {*KINDS[kind]} if args.only is None else {"none", *args.only}
            names = [v for v, of in VARIANTS.items() if of[0] == kind and of[1] in asked]
            seconds |= _rounds(names, path, args.rounds)
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
            rows[-1]["over none alone"] = (
                statistics.median(taken) / statistics.median(seconds[BASE]) - 1
            )
    parameters = args.vocab * args.hidden + args.layers * (args.hidden * args.hidden * 12)
    tokens = args.sequences * args.tokens
    print(f"\nLearner step of {tokens} sampled tokens, about {parameters / 1e6:.0f}M parameters, ")
    print(f"vocabulary {args.vocab}, k={args.topk}, micro-batches of {args.micro} tokens, ")
    print(f"{args.rounds} rounds; {machine()}\n")
    print(table(rows))
    print(f"\nMismatch metrics of such a step: {measuring(args):.4f} CPU s, of all kinds of actors")


def measuring(args: argparse.Namespace) -> float:
    """CPU seconds of `mismatch_metrics` on a step of the same size, the least of five."""
    import torch

    from rlcore.corrections.mismatch import mismatch_metrics
    from rlcore.corrections.numerics import OneRank
    from rlcore.learner.batch import build_batch

    torch.set_num_threads(args.threads)
    sent = build_batch(groups(args), with_topk=True, device=torch.device("cpu")).sent
    sent.logp_ref = sent.logp_inf + 0.01 * torch.randn(sent.logp_inf.shape)
    sent.ref_topk_ids, sent.ref_topk_logp = sent.topk_ids_inf, sent.topk_logp_inf
    sent.ref_logp_at_inf_ids = sent.topk_logp_inf
    taken = []
    for _ in range(5):
        begin = time.process_time()
        mismatch_metrics(sent, OneRank(), AisSpec())
        taken.append(time.process_time() - begin)
    return min(taken)


def _rounds(names: list[str], path: str, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each round's step, by variant; all variants' processes live at once."""
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
        [*again(__spec__), *sys.argv[1:], "--serve", name, "--model", path],
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
            continue  # output of a library


if __name__ == "__main__":
    main()
