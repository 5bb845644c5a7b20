"""Masked diffusion with rounded actors: no correction, TIS and AIS over seeds.

    python -m benchmarks.evidence.diffusion --model FOLDER [--seeds 0 1 2 3 4] [--steps 60]
        [key=value ...]

FOLDER is the warmed-up model that every run starts from (experiment=diffusion leaves it in
cache/warmup); the seed changes prompts and samples. A finished run is appended to a JSONL file
beside the page and is not made again: an interrupted benchmark continues, all arms of a seed before
the next seed. The page is written anew after every run. Accuracy is the policy's own, on a plain
engine (`evaluation.dense_actor`).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, rlcore, table
from benchmarks.status import run_and_record

PAGE = Path(__file__).resolve().parents[1] / "results" / "diffusion_cpu.md"
ACTORS = {
    "float32": ["actor=bf16"],
    "fp8": ["actor=fp8"],
    "int4": ["actor=fp8", "actor.fp8.rounding=int4"],
}
CORRECTIONS = {"none": "none", "tis": "[tis]", "ais": "[ais]"}
ARMS = [("float32", "none"), *((a, c) for a in ("int4", "fp8") for c in CORRECTIONS)]
NAME = "eval/digits"
SEEDS = [0, 1, 2, 3, 4]


def measured(actor: str, correction: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One whole run."""
    run = rlcore(
        "train",
        "experiment=diffusion",
        *ACTORS[actor],
        f"correction={CORRECTIONS[correction]}",
        f"model.path={args.model}",
        f"seed={seed}",
        f"schedule.steps={args.steps}",
        f"learner.lr_decay_steps={args.steps}",
        "evaluation.dense_actor=true",
        "evaluation.every=0",
        "logging=quiet",
        "checkpoint.at_end=false",
        *args.words,
    )
    found = [row for row in run.rows if f"{NAME}/greedy" in row]

    def mean(name: str) -> float:
        return statistics.fmean(row[name] for row in run.rows if row.get(name) is not None)

    return {
        "actor": actor,
        "correction": correction,
        "seed": seed,
        "steps": args.steps,
        "words": args.words,
        "machine": machine(),
        "seconds": run.seconds,
        "start": found[0][f"{NAME}/mean@1"],
        "end": found[-1][f"{NAME}/mean@1"],
        "greedy start": found[0][f"{NAME}/greedy"],
        "greedy end": found[-1][f"{NAME}/greedy"],
        "kl": mean("mismatch/kl_k3"),
        "abs dlogp": mean("mismatch/abs_dlogp_mean"),
        "ess": mean("mismatch/ess"),
        "token variance": mean("estimate/token_variance"),
        "sequence variance": mean("estimate/sequence_variance"),
        "rewards": [row["reward/mean"] for row in run.rows],
    }


def recorded(page: Path) -> list[dict[str, Any]]:
    """The runs that are finished."""
    lines = page.with_suffix(".jsonl")
    if not lines.exists():
        return []
    return [json.loads(line) for line in lines.read_text().splitlines()]


def wanted(
    runs: list[dict[str, Any]], seeds: list[int], steps: int, words: list[str]
) -> list[tuple[str, str, int]]:
    """The runs that are missing: (actor, correction, seed)."""
    made = {
        (r["actor"], r["correction"], r["seed"])
        for r in runs
        if r["words"] == words and r["steps"] == steps
    }
    return [(*arm, seed) for seed in seeds for arm in ARMS if (*arm, seed) not in made]


HEAD = """# Masked diffusion with rounded actors

Written by `benchmarks/evidence/diffusion.py`, on {machines}. A masked-diffusion model of 0.8M
parameters sorts three to five digits (`experiment=diffusion`, from one warmed-up model); actors
hold rounded weights, the learner float32. Accuracy is the policy's on held-out numbers, sampled;
mean and sample standard deviation over the seeds that are done. The mismatch is of the estimated
log-probs, the variance of the estimate is over prompt masks.
"""


def page_of(runs: list[dict[str, Any]]) -> str:
    """The page in Markdown."""
    parts = [HEAD.format(machines=" and ".join(sorted({run["machine"] for run in runs})))]
    for steps in sorted({run["steps"] for run in runs}):
        rows = [row for arm in ARMS if (row := _row(arm, runs, steps))]
        missing = wanted(runs, SEEDS, steps, [])
        parts += [f"## {steps} optimizer steps", "", table(rows), ""]
        done = len(SEEDS) * len(ARMS) - len(missing)
        rest = "; the others are open" if missing else ""
        parts += [f"Done: {done} of {len(SEEDS) * len(ARMS)} runs{rest}.", ""]
    return "\n".join(parts)


def _row(arm: tuple[str, str], runs: list[dict[str, Any]], steps: int) -> dict[str, Any] | None:
    own = [r for r in runs if (r["actor"], r["correction"]) == arm and r["steps"] == steps]
    if not own:
        return None
    ends = [r["end"] for r in own]
    spread = f" ± {statistics.stdev(ends):.3f}" if len(ends) > 1 else ""
    return {
        "actor": arm[0],
        "correction": arm[1],
        "seeds": len(own),
        "accuracy, start": f"{statistics.fmean(r['start'] for r in own):.3f}",
        "accuracy, end": f"{statistics.fmean(ends):.3f}{spread}",
        "per seed": " ".join(f"{e:.3f}" for e in ends),
        "greedy, end": f"{statistics.fmean(r['greedy end'] for r in own):.3f}",
        "KL(p_inf, p_ref)": f"{statistics.fmean(r['kl'] for r in own):.2g}",
        "ESS": f"{statistics.fmean(r['ess'] for r in own):.3f}",
        "token variance": f"{statistics.fmean(r['token variance'] for r in own):.2g}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the warmed-up model of every run")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("words", nargs="*", help="further overrides")
    args = parser.parse_args()
    for actor, correction, seed in wanted(recorded(args.page), args.seeds, args.steps, args.words):
        run = measured(actor, correction, seed, args)
        with args.page.with_suffix(".jsonl").open("a") as out:
            out.write(json.dumps(run) + "\n")
        args.page.write_text(page_of(recorded(args.page)))
        shown = ("actor", "correction", "seed", "seconds", "start", "end")
        print({key: run[key] for key in shown}, flush=True)
    print(page_of(recorded(args.page)))


if __name__ == "__main__":
    run_and_record(main, __file__)
