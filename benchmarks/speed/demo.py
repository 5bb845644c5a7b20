"""`make demo` on several seeds: time from nothing, held-out accuracy before and after, peak memory.

python -m benchmarks.speed.demo [--seeds 0 1 2] [--folder runs/demo-benchmark] [--out FILE]

Each finished run is a line of FOLDER/runs.jsonl, and a seed that has one is not run again. `--out`
writes the table to a file; without it the table is printed. One run takes up to 25 minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, rlcore, table
from benchmarks.status import run_and_record

MODEL = "smollm2-135m"
MODES = {"greedy": "eval/arithmetic/greedy", "sampled": "eval/arithmetic/mean@1"}
PROMPTS = 256  # of configs/experiment/demo.yaml

INTRODUCTION = """# `make demo`: SmolLM2-135M learns two-digit sums

`python -m benchmarks.speed.demo` on {machine}. Held-out sums, {prompts} a row, which training never
shows; greedy is the likeliest answer, sampled is drawn at temperature 1. The answer counts when it
is the right number and nothing else. z is the gain in units of its standard error, which is that of
two independent shares of {prompts}. Seconds are from an empty cache to the end: the model out of
the package registry, the start of all processes, {steps} steps, and every evaluation. Memory is
that of all processes together, shared pages once.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/demo-benchmark"))
    parser.add_argument("--out", type=Path, help="Markdown file that the table is written to")
    parser.add_argument("words", nargs="*", help="further overrides")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    lines = args.folder / "runs.jsonl"
    done = finished(lines)
    for seed in (s for s in args.seeds if s not in done):
        done[seed] = one_run(seed, args.folder, args.words)
        with lines.open("a") as f:
            f.write(json.dumps(done[seed]) + "\n")
        print(done[seed], flush=True)
    text = report([done[seed] for seed in args.seeds])
    if args.out is None:
        print(text)
    else:
        args.out.write_text(text)


def finished(lines: Path) -> dict[int, dict[str, Any]]:
    """The runs of a file of lines, by seed."""
    found = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    return {run["seed"]: run for run in found}


def one_run(seed: int, folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """Fetch the model and train on it, as `make demo` does with an empty cache."""
    name = f"seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    model = folder / f"{name}-model"
    began = time.monotonic()
    rlcore_command = str(Path(sys.executable).parent / "rlcore")
    subprocess.run([rlcore_command, "fetch", f"name={MODEL}", f"out={model}"], check=True)
    fetched = time.monotonic() - began
    run = rlcore(
        "train",
        "experiment=demo",
        f"seed={seed}",
        f"model.path={model}",
        *words,
        run_dir=folder / name,
    )
    found: dict[str, Any] = {"seed": seed, "steps": len(run.rows)}
    for mode, key in MODES.items():
        values = [row[key] for row in run.rows if key in row]
        found |= {f"{mode} before": values[0], f"{mode} after": values[-1]}
    return found | {
        "fetch seconds": fetched,
        "seconds": fetched + run.seconds,
        "memory GiB": run.peak_memory / 2**30,
    }


def gain_in_errors(before: float, after: float, count: int) -> float:
    """The difference of two shares of `count` answers each, over its standard error."""
    # a share of 0 or 1 has no spread of its own: half an answer more is counted
    shares = [min(max(p, 0.5 / count), 1 - 0.5 / count) for p in (before, after)]
    return (after - before) / math.sqrt(sum(p * (1 - p) / count for p in shares))


def report(runs: Sequence[dict[str, Any]]) -> str:
    """The results as a Markdown document."""
    rows = []
    for run in runs:
        row: dict[str, Any] = {"seed": run["seed"]}
        for mode in MODES:
            before, after = run[f"{mode} before"], run[f"{mode} after"]
            row[mode] = f"{before:.3f} to {after:.3f}"
            row[f"z, {mode}"] = f"{gain_in_errors(before, after, PROMPTS):.1f}"
        rows.append(
            {
                **row,
                "seconds": f"{run['seconds']:.0f}",
                "of them fetching": f"{run['fetch seconds']:.0f}",
                "memory GiB": f"{run['memory GiB']:.1f}",
            }
        )
    steps = "/".join(sorted({str(run["steps"]) for run in runs}))
    head = INTRODUCTION.format(machine=machine(), prompts=PROMPTS, steps=steps)
    return head + table(rows) + "\n"


if __name__ == "__main__":
    run_and_record(main, __file__)
