"""Sparse actors of a pretrained policy at long contexts: distance to the dense policy, before and
after some steps of DistillSparse.

    python -m benchmarks.evidence.sparse_kl --model FOLDER --data FILE [--contexts 1024 2048]
        [--blocks 16]
                                   [--steps 4] [--prompt dense|block|sparse]

Prompts are solved problems of a data file of questions and answers (GSM8K's train.jsonl) up to a
length, and one more question. A real sparse engine answers them; the dense policy scores the same
tokens, both over the whole vocabulary. Then the learner trains adapters beside the policy on the
actor's own samples at the first length (`learner.distill`), the engine takes theta + phi, and the
prompts are answered again. Responses are attended to by the budget, prompts as `--prompt` says.
`sparse_decode.py --model` has the seconds.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.agreement_tables import agreement
from benchmarks.evidence.drawn import Prompts, draw, policy_of, start
from benchmarks.harness import machine, table
from rlcore.attention.specs import SparseSpec
from rlcore.learner.specs import SPARSE_COPY, DistillSpec, LearnerJob, LearnerSpec, RankPlace
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.rollout.specs import ActorSpec
from rlcore.tasks.gsm8k import Gsm8k
from rlcore.testing.records import make_group, make_sampling
from rlcore.types import POLICY, Item, Trajectory
from rlcore.weights.stream import whole

FIRST = 1000  # training item from which prompts to train on are taken
SHOTS = 2000  # training item from which solved problems are taken


class FewShot(Prompts):
    """Prompts of about `length` tokens: solved problems, and the question."""

    def __init__(self, model: str, task: Any, length: int) -> None:
        super().__init__(model, task)
        self.length = length

    def question(self, item: Item) -> str:
        """Other problems for every question, so that no two prompts share a beginning."""
        place = SHOTS + 20 * int(item.prompt_id.rpartition("/")[2])
        size = self.task.size("train")
        text, asked = "", f"Question: {item.question}\nAnswer:"
        while True:
            shot = self.task.item("train", place % size)
            longer = f"{text}Question: {shot.question}\nAnswer: {self.task.worked_answer(shot)}\n\n"
            if len(self.encoded(longer + asked)) > self.length:
                return text + asked
            text, place = longer, place + 1


def learner(model: str, rule: SparseSpec, args: argparse.Namespace) -> Any:
    """A rank that trains the policy and, beside it, the adapters of the sparse copy."""
    from rlcore.learner.rank import LearnerRank

    spec = LearnerSpec(
        lr=args.lr,
        lr_warmup_steps=0,
        micro_batch_tokens=4096,
        num_cpus=args.threads,
        distill=DistillSpec(kl="topk", lr=args.adapters_lr),
    )
    job = LearnerJob(
        model_path=model,
        learner=spec,
        objective=ObjectiveSpec(),
        corrections={},
        sampling=make_sampling(logprobs_k=20),
        total_steps=args.steps,
        run_seed=0,
        pad_id=0,
        sparse=rule,
    )
    return LearnerRank(job, RankPlace(0, 1, "127.0.0.1", 0, timeout_s=600))


def rule_of(args: argparse.Namespace) -> SparseSpec:
    own = {"prompt_block": args.prompt_block} if args.prompt == "block" else {}
    return SparseSpec(blocks=args.blocks, prompt=args.prompt, **own)


def by_group(done: Sequence[Trajectory], prompts: Prompts) -> list[Any]:
    """The groups of a step."""
    ids = sorted({t.group_id for t in done})
    groups = [[t for t in done if t.group_id == g] for g in ids]
    return [make_group(group, [prompts.reward(t) for t in group]) for group in groups]


def cotrained(engine: Any, prompts: Prompts, policy: Any, args: argparse.Namespace) -> Any:
    """Alternate samples of the engine and steps of the learner; the dense policy after them."""
    rank = learner(args.model, rule_of(args), args)
    for step in range(args.steps):
        begun = time.perf_counter()
        first = FIRST + step * args.train_groups
        groups = range(first, first + args.train_groups)
        _, done = draw(engine, groups, prompts, policy, shape=(args.samples, args.tokens))
        rank.begin_phase([by_group(done, prompts)])
        metrics = rank.train_step(step)
        weights = dict(rank.published_weights(SPARSE_COPY, "float32"))
        engine.update_weights(step + 1, whole(weights), "finish")
        print(
            f"step {step + 1}: KL to the dense policy {metrics['loss/distill_kl']:.4f}, "
            f"{time.perf_counter() - begun:.0f} s, of which dense "
            f"{metrics['time/learner_update_s']:.0f} and sparse "
            f"{metrics['time/learner_distill_s']:.0f}",
            flush=True,
        )
    trained = copy.deepcopy(policy)
    trained.load_state_dict(dict(rank.published_weights(POLICY, "float32")), strict=False)
    return trained


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a Hugging Face folder of a chat model")
    parser.add_argument("--data", type=Path, required=True, help="JSONL of questions and answers")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--blocks", type=int, default=16, help="budget, in pages of 16 tokens")
    parser.add_argument("--prompt", choices=["dense", "block", "sparse"], default="dense")
    parser.add_argument("--prompt-block", type=int, default=128, help="positions, with block")
    parser.add_argument("--groups", type=int, default=4, help="prompts of each length")
    parser.add_argument("--samples", type=int, default=2, help="responses to a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="length limit of a response")
    parser.add_argument("--steps", type=int, default=4, help="of co-training")
    parser.add_argument("--train-groups", type=int, default=1, help="prompts of a step")
    parser.add_argument("--lr", type=float, default=1e-6, help="of the policy")
    parser.add_argument("--adapters-lr", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    task, policy = Gsm8k(train_path=str(args.data)), policy_of(args.model)
    sets = {n: FewShot(args.model, task, n) for n in args.contexts}
    rule = rule_of(args)
    actor = ActorSpec(kind="sparse", sparse=rule, kv_cache_gib=1.5, max_num_seqs=16)
    longest = max(args.contexts) + args.tokens + 64
    engine = start(args.model, actor, int(policy.config.vocab_size), longest)
    rows: list[dict[str, Any]] = []

    def compared(what: str, policy: Any) -> None:
        for length, prompts in sets.items():
            shape = (args.samples, args.tokens)
            found, _ = draw(engine, range(args.groups), prompts, policy, shape=shape)
            pages = -(-length // rule.block_size)
            budget = f"{args.blocks} of {pages} pages, {args.prompt} prompts"
            rows.append(agreement(f"{length} tokens, {budget}, {what}", found))
            print(rows[-1], flush=True)

    compared("training-free", policy)
    if args.steps:
        trained = cotrained(engine, sets[args.contexts[0]], policy, args)
        compared(f"{args.steps} steps of co-training", trained)
    print(f"\nResponses of at most {args.tokens} tokens; {machine()}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
