"""The quickstart on several seeds: time with the warm-up, held-out accuracy, peak memory.

python -m benchmarks.speed.quickstart [--seeds 0 1 2] [-- key=value ...]
"""

from __future__ import annotations

import argparse
import tempfile

from benchmarks.harness import machine, rlcore, table
from benchmarks.status import run_and_record

KEY = "eval/digits/greedy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("words", nargs="*", help="further overrides")
    args = parser.parse_args()
    found = []
    for seed in args.seeds:
        # an empty cache, so that the time includes the warm-up
        with tempfile.TemporaryDirectory() as cache:
            run = rlcore(
                "train",
                "experiment=quickstart",
                f"seed={seed}",
                f"model.warmup.cache_dir={cache}",
                *args.words,
            )
        evals = [(r["eval/policy_version"], r[KEY]) for r in run.rows if KEY in r]
        found.append(
            {
                "seed": seed,
                "seconds": run.seconds,
                "accuracy at start": evals[0][1],
                "accuracy at end": evals[-1][1],
                "doubled and >= 0.90": evals[-1][1] >= max(0.90, 2 * evals[0][1]),
                "peak memory GiB": run.peak_memory / 2**30,
                "steps": len(run.rows),
                "wait share": sum(r["time/wait_data_s"] for r in run.rows)
                / sum(r["time/step_s"] for r in run.rows),
            }
        )
        print(found[-1], flush=True)
    print(f"\nQuickstart on {machine()}\n")
    print(table(found))


if __name__ == "__main__":
    run_and_record(main, __file__)
