"""A short run of a pretrained model: seconds of a step by part, and the memory of every process.

    python -m benchmarks.speed.real_run --model FOLDER [--steps 5] [--adapters] [key=value ...]

Asynchronous, one actor and one learner rank, with Jackpot; the whole model is trained, or adapters
with `--adapters`. Seconds are medians over the steps but the first two. Memory is the proportional
set size, in which pages that processes share are divided among them; the largest sample of one a
second.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import machine, rlcore, table

RUN = [
    "model=smollm2",
    "task=arithmetic",
    "task.args.max_digits=2",
    "task.args.credit=digits",
    "task.args.question='What is {a} {op} {b}? Answer with just the number.'",
    "schedule=async",
    "schedule.max_staleness=1",
    "schedule.groups_per_step=2",
    "rollout.samples_per_prompt=8",
    "rollout.max_new_tokens=24",
    "correction=[jackpot]",
    "actor.bf16.max_num_seqs=64",
    "evaluation.every=0",
    "evaluation.at_start=false",
    "evaluation.prompts=8",
    "checkpoint.at_end=false",
    "cluster.object_store_mib=1280",
    "logging=quiet",
]
SKIPPED = 2  # steps that also start things up
SMALLEST = 20e6  # bytes: smaller processes are shown together


def seconds(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Median seconds of each part of a step, the longest first; parts overlap where processes
    do."""
    kept = rows[SKIPPED:] or rows
    names = {name for row in kept for name in row if name.startswith("time/")}
    names -= {"time/total_s"}
    found = {n: statistics.median(row.get(n) or 0.0 for row in kept) for n in names}
    ordered = sorted(found.items(), key=lambda pair: -pair[1])
    return [{"part": name, "seconds": value} for name, value in ordered if value > 0]


def memory(processes: Mapping[str, float]) -> list[dict[str, Any]]:
    """Peak memory of each process, the largest first; the small ones together."""
    ordered = sorted(processes.items(), key=lambda pair: -pair[1])
    rows = [
        {"process": name.rpartition(" ")[0], "GiB": size / 2**30}
        for name, size in ordered
        if size >= SMALLEST
    ]
    rest = [size for _, size in ordered if size < SMALLEST]
    return [*rows, {"process": f"{len(rest)} smaller ones", "GiB": sum(rest) / 2**30}]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a Hugging Face folder of a chat model")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--adapters", action="store_true", help="train LoRA instead of the model")
    parser.add_argument("words", nargs="*", help="further overrides")
    args = parser.parse_args()
    learner = ["learner=lora", "learner.lr=5e-4"] if args.adapters else ["learner.lr=1e-5"]
    words = [*RUN, *learner, f"model.path={args.model}", f"schedule.steps={args.steps}"]
    run = rlcore("train", *words, *args.words)
    kept = run.rows[SKIPPED:] or run.rows
    print(f"\n{args.steps} steps in {run.seconds:.0f} s with start and end; {machine()}\n")
    print(table(seconds(run.rows)))
    names = ("throughput/rollout_tokens_per_s", "throughput/train_tokens_per_s", "tokens/trained")
    rates = {n: statistics.median(r[n] for r in kept) for n in names if n in kept[0]}
    print(f"\n{table([rates])}\n\nLargest memory: {run.peak_memory / 2**30:.2f} GiB in all\n")
    print(table(memory(run.processes)))


if __name__ == "__main__":
    main()
