"""Sparse actors with and without DistillSparse: accuracy of the dense policy, and cost of a step.

    python -m benchmarks.evidence.cheap_actors [--seeds 0 1 2] [--steps 40] [--work FOLDER]
        [key=value ...]

The task is copying 96 digits (194 tokens with the prompt, 13 pages of 16), the budget 4 pages.
Accuracy is the share of greedy held-out answers with all digits right, reward the share of right
digits. "dense" is the policy on a dense engine. "sparse" is what the actors serve at the end of the
run, with the actors' attention: the same weights in the training-free modes, theta + phi merged
with DistillSparse.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, read_rows, rlcore, table

EIGHT = ["rollout.samples_per_prompt=8", "algorithm.train_on_best=null"]
MODES: dict[str, list[str]] = {
    "dense actor": ["experiment=sparse_training_free", "actor=bf16", "evaluation.dense_actor=null"],
    "sparse, training-free": ["experiment=sparse_training_free"],
    "sparse rollout, sparse training": [
        "experiment=sparse_training_free",
        "learner.train_sparse=true",
    ],
    "DistillSparse, 8 of 8": ["experiment=distill_sparse", *EIGHT],
    "DistillSparse, best 8 of 12": ["experiment=distill_sparse"],
}
TIMES = {
    "rollout": ("time/rollout_s",),
    "wait for rollouts": ("time/wait_data_s",),
    "dense log-probs": ("time/learner_ref_s",),
    "dense update": ("time/learner_update_s",),
    "sparse update": ("time/learner_distill_s",),
    "publish": ("time/publish_s",),
}


def sparse_accuracy(folder: Path) -> dict[str, float]:
    """Held-out accuracy of the last checkpoint with the actors' attention."""
    words = [str(Path(sys.executable).parent / "rlcore"), "eval", f"run_dir={folder}"]
    subprocess.run(
        [*words, "evaluation.dense_actor=false"], check=True, capture_output=True, timeout=1800
    )
    return dict(json.loads((folder / "eval.json").read_text()))


def measure(mode: str, seed: int, folder: Path, steps: int, words: list[str]) -> dict[str, Any]:
    """A row of the table, from a new run or from a finished one in `folder`."""
    if not (folder / "metrics.jsonl").exists() or read_rows(folder)[-1]["step"] < steps:
        words = [f"seed={seed}", f"schedule.steps={steps}", "resume=auto", *words]
        rlcore(
            "train", *MODES[mode], "logging=quiet", "evaluation.every=10", *words, run_dir=folder
        )
    rows = read_rows(folder)
    evals = [r for r in rows if "eval/digits/greedy" in r]
    first, last = evals[0], evals[-1]
    quarter = max(1, len(rows) // 4)
    out: dict[str, Any] = {
        "mode": mode,
        "seed": seed,
        "dense at start": first["eval/digits/greedy"],
        "dense at end": last["eval/digits/greedy"],
        "dense reward at start": first["eval/digits/greedy_reward"],
        "dense reward at end": last["eval/digits/greedy_reward"],
        "KL actor to policy, first quarter": _mean(rows[:quarter], "mismatch/kl_k3"),
        "KL, last quarter": _mean(rows[-quarter:], "mismatch/kl_k3"),
        "rollout reward, last quarter": _mean(rows[-quarter:], "reward/mean"),
    }
    if mode != "dense actor":
        sparse = sparse_accuracy(folder)
        out["sparse at end"] = sparse["eval/digits/greedy"]
        out["sparse reward at end"] = sparse["eval/digits/greedy_reward"]
    kept = rows[2:-1] or rows
    for name, keys in TIMES.items():
        out[f"s: {name}"] = sum(_mean(kept, k) for k in keys)
    out["s: step"] = _mean(kept, "time/step_s")
    return out


def _mean(rows: list[dict[str, Any]], key: str) -> float:
    return sum(r.get(key) or 0.0 for r in rows) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument(
        "--work", type=Path, help="folder of the runs; finished runs in it are reused"
    )
    parser.add_argument("words", nargs="*", help="further overrides")
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp(prefix="rlcore-cheap-"))
    found = []
    for seed in args.seeds:
        for mode in args.modes:
            name = "".join(c if c.isalnum() else "-" for c in mode)
            found.append(measure(mode, seed, work / f"{name}-{seed}", args.steps, args.words))
            print(json.dumps(found[-1]), flush=True)
    print(f"\nCheap actors on {machine()}, {args.steps} steps, seeds {args.seeds}\n")
    print(table(found, [k for k in _columns(found) if not k.startswith("s: ")]))
    print("\nMeans over the seeds\n")
    means = []
    for mode in args.modes:
        mine = [f for f in found if f["mode"] == mode]
        keys = [k for k in _columns(mine) if k not in ("mode", "seed")]
        means.append({"mode": mode, **{k: sum(f[k] for f in mine) / len(mine) for k in keys}})
    print(table(means, [k for k in _columns(means) if not k.startswith("s: ")]))
    print("\nSeconds of a step, by part; rollouts overlap with learning, apart from the wait\n")
    print(table(means, ["mode", *(k for k in _columns(means) if k.startswith("s: "))]))


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(k for row in rows for k in row))


if __name__ == "__main__":
    main()
