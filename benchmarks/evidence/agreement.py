"""How far actors are from a pretrained policy, token by token, and what corrections make of it.

    python -m benchmarks.evidence.agreement --model FOLDER --work FOLDER
        [--only float32 "fp8 channel"]

Every kind of actor samples with an engine of its own (`drawn.ACTORS`); what it drew is kept in
`--work` and not drawn again. "stale N": the float32 actor's responses, judged by a learner that has
taken N optimizer steps since (LoRA, GRPO, one group of 8 a step, of the same actor). Distributions
are over the whole vocabulary on both sides. Prints the tables of `agreement_tables.py`, and
Jackpot's normaliser over the top k against the whole vocabulary.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from benchmarks.evidence.agreement_tables import (
    agreement,
    capped,
    kept,
    normaliser,
    safe_set,
    winners,
    worst,
)
from benchmarks.evidence.drawn import (
    ACTORS,
    Prompts,
    Sums,
    against,
    collect,
    load,
    policy_of,
    sample,
    save,
    start,
)
from benchmarks.harness import machine, table
from rlcore.rollout.specs import ActorSpec
from rlcore.types import POLICY, Trajectory

KS = (5, 10, 20, 40)
TABLES = {
    "Agreement": agreement,
    "Share of tokens that stay, with a weight above 0": kept,
    "Share that a cap truncates; signals": capped,
    "Safe set": safe_set,
}
STEPS = (1, 4, 16)  # optimizer steps of the stale actors
LEARNER = {"lr": 5e-4, "lr_warmup_steps": 0, "lora": {}}


def draw(model: str, work: Path, names: list[str], shape: tuple[int, int, int]) -> None:
    """Draw and compare what `work` does not hold yet."""
    prompts, policy = Prompts(model, Sums()), policy_of(model)
    stale = [f"stale {n}" for n in STEPS]
    for name in names:
        path = work / f"{name}.pt"
        if name in stale or path.exists():
            continue
        actor = ActorSpec(kv_cache_gib=0.5, **ACTORS[name])
        drawn, _ = collect(model, actor, prompts, policy, shape=shape)
        save(drawn, path)
        print(f"drew {name}", flush=True)
    if all((work / f"{name}.pt").exists() for name in stale if name in names):
        return
    samples, tokens = 8, shape[2]
    engine = start(model, ActorSpec(kv_cache_gib=0.5), 20)
    last = max(STEPS)
    # groups of their own for training; the first ones are what is compared
    groups = range(shape[0] + last)
    done = sample(engine, [r for g in groups for r in prompts.requests(g, samples, tokens, 20)])
    engine.close()
    judged = [t for t in done if t.group_id < shape[0] and t.sample_index < shape[1]]
    training = [[t for t in done if t.group_id == shape[0] + s] for s in range(last)]
    learner = copy.deepcopy(policy)
    for step, weights in learner_versions(model, prompts, training):
        if step in STEPS and f"stale {step}" in names:
            learner.load_state_dict(weights, strict=False)
            save(against(policy, learner, prompts, judged), work / f"stale {step}.pt")
            print(f"compared stale {step}", flush=True)


def learner_versions(
    model: str, prompts: Prompts, training: list[list[Trajectory]]
) -> Iterator[tuple[int, Mapping[str, torch.Tensor]]]:
    """The policy's weights after each optimizer step, one group a step."""
    from rlcore.learner.rank import LearnerRank
    from rlcore.learner.specs import LearnerJob, LearnerSpec, RankPlace
    from rlcore.objectives.specs import ObjectiveSpec
    from rlcore.testing.records import make_group, make_sampling

    job = LearnerJob(
        model_path=model,
        learner=LearnerSpec(**LEARNER),
        objective=ObjectiveSpec(),
        corrections={},
        sampling=make_sampling(logprobs_k=0),
        total_steps=len(training),
        run_seed=0,
        pad_id=0,
    )
    rank = LearnerRank(job, RankPlace(0, 1, "127.0.0.1", 0, timeout_s=600))
    for step, group in enumerate(training):
        rank.begin_phase([[make_group(group, [prompts.reward(t) for t in group])]])
        metrics = rank.train_step(step)
        print(f"step {step + 1}: gradient norm {metrics['grad_norm']:.3f}", flush=True)
        yield step + 1, dict(rank.published_weights(POLICY, "float32"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*ACTORS, *(f"stale {n}" for n in STEPS)]
    parser.add_argument("--model", required=True, help="a Hugging Face folder of a chat model")
    parser.add_argument("--work", type=Path, required=True, help="keeps what was drawn")
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--groups", type=int, default=12)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32, help="length limit of a response")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    draw(args.model, args.work, args.only, (args.groups, args.samples, args.tokens))
    found = {name: load(args.work / f"{name}.pt") for name in args.only}
    print(f"\nResponses of at most {args.tokens} tokens; {machine()}")
    for title, row_of in TABLES.items():
        print(f"\n{title}\n\n{table([row_of(name, drawn) for name, drawn in found.items()])}")
    tokenizer = Prompts(args.model, Sums()).tokenizer
    named = [{"actor": n, "p_inf to p_ref": worst(drawn, tokenizer)} for n, drawn in found.items()]
    print(f"\nTokens of largest |dlogp|\n\n{table(named)}")
    for k in KS:
        rows = {name: normaliser(drawn, k) for name, drawn in found.items()}
        shown = [{"actor": name, **row} for name, row in rows.items()]
        print(f"\nMean |Z_k - Z|, k={k}\n\n{table(shown)}")
        print(f"\n{table(winners(list(rows.values())))}")


if __name__ == "__main__":
    main()
