"""Asynchronous against on-policy schedules, with the same actor and learner.

    python -m benchmarks.speed.schedules [--steps 40] [--pairs 3]

Tokens per step are reported too, so that different response lengths would show. Rates exclude the
first `--skip` steps, in which caches and allocators warm up.
"""

from __future__ import annotations

import argparse

from benchmarks.harness import machine, median, rlcore, table
from benchmarks.status import run_and_record

SCHEDULES = {
    "on_policy": ["schedule=on_policy"],
    "async eta=1": ["schedule=async", "schedule.max_staleness=1"],
    "async eta=4": ["schedule=async", "schedule.max_staleness=4"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--skip", type=int, default=8)
    parser.add_argument("words", nargs="*", help="further overrides")
    args = parser.parse_args()
    rows = []
    for pair in range(args.pairs):
        for name, words in SCHEDULES.items():
            run = rlcore(
                "train",
                "experiment=quickstart",
                *words,
                f"schedule.steps={args.steps}",
                "evaluation.every=0",
                "evaluation.at_start=false",
                "logging=quiet",
                "checkpoint.at_end=false",
                f"seed={pair}",
                *args.words,
            )
            kept = run.rows[args.skip : -1]  # the last row holds the final evaluation
            wall = sum(r["time/step_s"] for r in kept)
            rows.append(
                {
                    "pair": pair,
                    "schedule": name,
                    "steps/s": len(kept) / wall,
                    "tokens/step": sum(r["train/tokens"] for r in kept) / len(kept),
                    "wait share": sum(r["time/wait_data_s"] for r in kept) / wall,
                    "publish stop share": sum(r.get("time/publish_stop_s", 0.0) for r in kept)
                    / wall,
                    "staleness mean": sum(r["staleness/mean"] for r in kept) / len(kept),
                    "staleness max": max(r["staleness/max"] for r in kept),
                }
            )
            print(rows[-1], flush=True)
    print(f"\nSchedules on {machine()}, medians of {args.pairs} runs\n")
    summary = []
    base = median(r["steps/s"] for r in rows if r["schedule"] == "on_policy")
    for name in SCHEDULES:
        mine = [r for r in rows if r["schedule"] == name]
        keys = [k for k in mine[0] if k not in ("pair", "schedule")]
        summary.append({"schedule": name, **{k: median(r[k] for r in mine) for k in keys}})
        summary[-1]["against on_policy"] = summary[-1]["steps/s"] / base
    print(table(summary))


if __name__ == "__main__":
    run_and_record(main, __file__)
