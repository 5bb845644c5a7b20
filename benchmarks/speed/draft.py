"""A draft of a pretrained policy: some of its layers, distilled on its samples, then at work.

    python -m benchmarks.speed.draft --model FOLDER --work FOLDER [--layers 4] [--steps 40]

1. `rlcore.models.fresh.cut_model` makes the start: the policy's embeddings and evenly spaced
   layers.
2. The policy samples answers to training prompts; those that ended by themselves become the worked
   answers of a data file.
3. `rlcore sft` trains the start on that file.
4. A run with `actor=draft`: the draft samples, Jackpot corrects, the policy learns, and the draft
   is trained on its own samples with the reverse KL to the policy.

Before and after 3 the draft draws responses of its own on other prompts: exact KL to the policy,
acceptance (Jackpot's Z over the whole vocabulary), ESS. What exists in `--work` is not made again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.evidence.agreement_tables import agreement
from benchmarks.evidence.drawn import (
    Drawn,
    Prompts,
    Sums,
    collect,
    load,
    policy_of,
    sample,
    save,
    start,
)
from benchmarks.harness import machine, read_rows, rlcore, table
from benchmarks.status import run_and_record
from rlcore.models.fresh import cut_model
from rlcore.models.text import decode_response
from rlcore.rollout.specs import ActorSpec
from rlcore.types import Trajectory

FIRST = 1000  # training item from which distillation prompts are taken
SAMPLES = 4  # a prompt
DRAWN = Path(__file__).resolve().parents[1] / "evidence" / "drawn.py"
SHARED = ["model=smollm2", "logging=quiet", "cluster.object_store_mib=1536"]
TRAIN = [
    "task=arithmetic",
    f"task.name={DRAWN}:Sums",
    "actor=draft",
    "correction=[jackpot]",
    "learner.lr=1e-5",
    "learner.draft={lr: 1e-4, kl_coef: 1.0}",
    "schedule=async",
    "schedule.max_staleness=1",
    "schedule.groups_per_step=2",
    "rollout.samples_per_prompt=8",
    "actor.draft.max_num_seqs=32",
    "actor.draft.kv_cache_gib=0.5",
    "evaluation.every=0",
    "evaluation.at_start=false",
    "evaluation.prompts=8",
    "checkpoint.at_end=false",
]
SHOWN = {
    "KL, k3": "mismatch/kl_k3",
    "acceptance": "mismatch/acceptance",
    "ESS": "mismatch/ess",
    "kept": "correction/kept_share",
    "reward": "reward/mean",
    "seconds": "time/step_s",
}


def worked(drawn: list[Trajectory], prompts: Prompts) -> list[dict[str, str]]:
    """Question and answer of every response that ended by itself: what a cut-off one lacks must not
    be learnt as an end."""
    rows = []
    for t in drawn:
        if t.finish_reason == "stop":
            answer = decode_response(prompts.tokenizer, t.sampled_ids.tolist())
            rows.append(
                {"question": prompts.task.item("train", t.group_id).question, "worked": answer}
            )
    return rows


def samples(args: argparse.Namespace, prompts: Prompts, path: Path) -> int:
    """Write the policy's samples to a data file, unless it is there; the number of rows."""
    if not path.exists():
        engine = start(args.model, ActorSpec(kv_cache_gib=1.0, max_num_seqs=128), 0)
        groups = range(FIRST, FIRST + args.prompts)
        asked = [r for g in groups for r in prompts.requests(g, SAMPLES, args.tokens, 0)]
        rows = worked(sample(engine, asked), prompts)
        engine.close()
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(path.read_text().splitlines())


def compared(model: Path, args: argparse.Namespace, prompts: Prompts, path: Path) -> Drawn:
    """What a draft draws, against the policy; kept in `path`."""
    if not path.exists():
        shape = (args.groups, SAMPLES, args.tokens)
        actor = ActorSpec(kv_cache_gib=0.5)
        drawn, _ = collect(str(model), actor, prompts, policy_of(args.model), shape=shape)
        save(drawn, path)
    return load(path)


def distil(args: argparse.Namespace, data: Path, cut: Path) -> Path:
    """`rlcore sft` of the cut model on the samples; its folder."""
    run_dir = args.work / "sft"
    if not (run_dir / "model").is_dir():
        words = [
            *SHARED,
            "task=file",
            f"task.args.train_path={data}",
            f"task.args.grader={DRAWN}:no_grade",
            "task.args.answer_field=null",
            "task.args.worked_field=worked",
            f"model.path={cut}",
            f"model.warmup={{steps: {args.steps}, batch_size: {args.batch}, lr: {args.lr}}}",
        ]
        rlcore("sft", *words, run_dir=run_dir)
    return run_dir / "model"


def train(args: argparse.Namespace, draft: Path) -> list[dict[str, Any]]:
    """A short run with the draft as its actor; a row for each of its steps."""
    run_dir = args.work / "train"
    if not read_rows(run_dir):
        words = [
            *SHARED,
            *TRAIN,
            f"model.path={args.model}",
            f"actor.draft.draft_path={draft}",
            f"rollout.max_new_tokens={args.tokens}",
            f"schedule.steps={args.train_steps}",
        ]
        rlcore("train", *words, run_dir=run_dir)
    return [
        {"step": row["step"], **{name: row.get(key, "") for name, key in SHOWN.items()}}
        for row in read_rows(run_dir)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a Hugging Face folder of a chat model")
    parser.add_argument("--work", type=Path, required=True, help="keeps what was made")
    parser.add_argument("--layers", type=int, default=4, help="of the draft")
    parser.add_argument("--prompts", type=int, default=32, help=f"with {SAMPLES} samples each")
    parser.add_argument("--steps", type=int, default=40, help="of supervised training")
    parser.add_argument("--batch", type=int, default=8, help="worked answers a step")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--train-steps", type=int, default=3, help="of reinforcement learning")
    parser.add_argument("--groups", type=int, default=8, help="prompts that are compared")
    parser.add_argument("--tokens", type=int, default=32, help="length limit of a response")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    prompts, cut, data = Prompts(args.model, Sums()), args.work / "cut", args.work / "samples.jsonl"
    if not cut.is_dir():
        cut_model(args.model, cut, args.layers)
    rows = samples(args, prompts, data)
    before = compared(cut, args, prompts, args.work / "before.pt")
    draft = distil(args, data, cut)
    after = compared(draft, args, prompts, args.work / "after.pt")
    print(f"\n{args.layers} layers, {args.steps} steps on {rows} samples; {machine()}\n")
    print(table([agreement("cut", before), agreement("distilled", after)]))
    print(f"\nA run with the distilled draft\n\n{table(train(args, draft))}")


if __name__ == "__main__":
    run_and_record(main, __file__)
