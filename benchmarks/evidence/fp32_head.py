"""What an FP32 LM head on either side removes of the mismatch of a bfloat16 model, and its cost.

    python -m benchmarks.evidence.fp32_head [--prompts 32] [--tokens 128] [--out FILE]

A real vLLM engine samples with its head in bfloat16 or float32; the learner's model, the same
weights in bfloat16, scores these tokens with its own head in bfloat16 or float32. Four cells: mean
and largest |log p_ref - log p_inf|. Everything else is equal on both sides, so that what remains
with both heads in float32 is the rounding inside the two implementations of the layers. The model
is random, its head scaled so that distributions have a few nats of entropy.

Cost: the actor's tokens per second, and the learner's head pass, forward and backward, per 1000
tokens. The best of several rounds counts, because other load can only slow a round down.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.status import run_and_record
from rlcore.learner.lm_head import HeadSpec, head_pass
from rlcore.learner.packing import pack
from rlcore.learner.policy import Policy, load_causal_lm
from rlcore.learner.sequences import TokenSequence
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.testing.records import make_sampling
from rlcore.types import Request, Trajectory

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz =+-"
MAX_LEN = 512
SHAPE = FreshModelSpec(
    hidden_size=192, layers=4, heads=6, intermediate_size=512, vocab_size=8192, tie_embeddings=False
)
HEADS = {False: "bfloat16", True: "float32"}


class Scores(NamedTuple):
    """Of the learner: log-probs and entropies of all sampled tokens, in order."""

    logp: np.ndarray
    entropy: np.ndarray


def model_folder(folder: Path, scale: float) -> str:
    """A random model whose distributions are neither flat nor certain."""
    from transformers import AutoModelForCausalLM

    path = build_fresh_model(folder, ALPHABET, SHAPE, seed=0, max_len=MAX_LEN)
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        lm.get_output_embeddings().weight.mul_(scale)
    lm.to(torch.bfloat16).save_pretrained(path)
    return str(path)


def sampled(path: str, fp32: bool, args: argparse.Namespace) -> tuple[list[Trajectory], float]:
    """What an engine draws, and its best rate in tokens per second."""
    from rlcore.rollout.specs import ActorSpec, EngineJob, start_engine

    actor = ActorSpec(dtype="bfloat16", fp32_head=fp32, max_num_seqs=args.prompts)
    engine = start_engine(EngineJob(actor, "bench-0", path, MAX_LEN, logprobs_k=0))
    spec = make_sampling(max_new_tokens=args.tokens, logprobs_k=0)
    prompts = [np.array([5, 6, 7, 8 + g % 20], np.int32) for g in range(args.prompts)]
    rates, done = [], []
    for _ in range(args.rounds + 1):  # the first warms up
        engine.add([Request(g, 0, "bench", p, spec, seed=g) for g, p in enumerate(prompts)])
        begun, done = time.perf_counter(), []
        while engine.unfinished():
            done += engine.step()
        rates.append(sum(len(t.logp_inf) for t in done) / (time.perf_counter() - begun))
    engine.close()
    return sorted(done, key=lambda t: t.group_id), max(rates[1:])


@torch.no_grad()
def scored(policy: Policy, drawn: list[Trajectory], fp32: bool) -> Scores:
    """The learner's pass over what was drawn, as training takes it."""
    episodes = [(TokenSequence(t.token_ids, t.sampled),) for t in drawn]
    logp: list[Any] = [None] * len(drawn)
    entropy: list[Any] = [None] * len(drawn)
    for mb in pack(episodes, 4096, "sorted"):
        _, token_logp, token_entropy, *_ = policy(mb, None, HeadSpec(1.0, 1024, fp32=fp32))
        for row, index in enumerate(mb.episodes.tolist()):
            logp[index] = token_logp[mb.row == row].numpy()
            entropy[index] = token_entropy[mb.row == row].numpy()
    return Scores(np.concatenate(logp), np.concatenate(entropy))


def head_seconds(policy: Policy, fp32: bool, rounds: int, tokens: int = 1000) -> float:
    """Forward and backward of the head pass over `tokens` positions, best round."""
    weight = policy.head.weight
    hidden = torch.randn(tokens, weight.shape[1], dtype=weight.dtype, requires_grad=True)
    targets = torch.randint(0, weight.shape[0], (tokens,))
    found = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        head_pass(hidden, weight, targets, HeadSpec(1.0, 1024, fp32=fp32)).logp.sum().backward()
        found.append(time.perf_counter() - begun)
    return min(found[1:])


def table(path: str, args: argparse.Namespace) -> list[str]:
    """The lines of both tables."""
    policy = Policy(load_causal_lm(path, "bfloat16", "sdpa"))
    lines = ["| actor's head | learner's head | mean abs dlogp | max abs dlogp | KL k3 |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    rates: dict[bool, float] = {}
    entropies: list[float] = []
    alone: list[float] = []  # rounding of the learner's head, on the same hidden states
    tokens = 0
    for actor in HEADS:
        drawn, rates[actor] = sampled(path, actor, args)
        inf = np.concatenate([t.logp_inf for t in drawn]).astype(np.float64)
        tokens = len(inf)
        both = {learner: scored(policy, drawn, learner) for learner in HEADS}
        alone.append(float(np.abs(both[True].logp - both[False].logp).mean()))
        for learner, scores in both.items():
            entropies.append(float(scores.entropy.mean()))
            d = scores.logp.astype(np.float64) - inf
            k3 = float((np.expm1(d) - d).mean())
            values = f"{np.abs(d).mean():.5f} | {np.abs(d).max():.4f} | {k3:.2e}"
            lines.append(f"| {HEADS[actor]} | {HEADS[learner]} | {values} |")
    seconds = {fp32: head_seconds(policy, fp32, args.rounds) for fp32 in HEADS}
    lines += ["", "| head | actor, tokens/s | learner, head pass per 1000 tokens |"]
    lines += ["| --- | --- | --- |"]
    for fp32, name in HEADS.items():
        lines.append(f"| {name} | {rates[fp32]:.0f} | {1000 * seconds[fp32]:.0f} ms |")
    extra = (SHAPE.vocab_size or 0) * SHAPE.hidden_size * 4 / 2**20
    note = (
        f"On the same hidden states the learner's two heads differ by {np.mean(alone):.5f} in mean "
        "abs dlogp: the head's own rounding. The rest is that of the layers, in two "
        f"implementations. {tokens} tokens a row, mean entropy {np.mean(entropies):.2f} nats, "
        "vocabulary "
        f"{SHAPE.vocab_size}, width {SHAPE.hidden_size}, {torch.get_num_threads()} threads. The "
        f"learner's float32 copy of the head's weight takes {extra:.0f} MiB during a pass."
    )
    return [*lines, "", note]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="length limit of a response")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=12.0, help="of the head's random weights")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = table(model_folder(Path(folder), args.scale), args)
    text = "\n".join(lines)
    print(text)
    if args.out:
        command = "python -m benchmarks.evidence.fp32_head"
        args.out.write_text(
            f"# FP32 LM head of a bfloat16 model\n\n`{command}`, on CPU.\n\n{text}\n"
        )


if __name__ == "__main__":
    run_and_record(main, __file__)
