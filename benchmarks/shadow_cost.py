"""Cost of measuring other lists of corrections beside a run's own (`correction.shadow`).

    python benchmarks/shadow_cost.py [--steps 30] [WORD ...]

Runs the quickstart with every batch measured, for one list and for four, and compares the time of a
measurement (`time/shadow_s`) with that of the step that it is part of (`time/step_s`) and of the
learner's update. WORDs are added to the run. Medians over the steps after the first two.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from harness import machine, rlcore, table

LISTS = {
    "tis": "[[tis]]",
    "jackpot": "[[jackpot]]",
    "tis, mis, jackpot, veto+ais": "[[tis],[mis],[jackpot],[veto,ais]]",
}
EVERY = 10  # the default of correction.shadow_every


def measured(name: str, shadow: str, steps: int, words: list[str]) -> dict[str, Any]:
    """A row of the table: seconds of a run whose batches are all measured."""
    given = [f"correction.shadow={shadow}", "correction.shadow_every=1", f"schedule.steps={steps}"]
    run = rlcore("train", "experiment=quickstart", "evaluation.every=0", *given, *words)
    rows = run.rows[2:]
    update = statistics.median(row["time/learner_update_s"] for row in rows)
    step = statistics.median(row["time/step_s"] for row in rows)
    one = statistics.median(row["time/shadow_s"] for row in rows)
    return {
        "lists": name,
        "ms a measurement": 1000 * one,
        "ms an update": 1000 * update,
        "ms a step": 1000 * step,
        f"share of an update, n={EVERY}": one / EVERY / (update - one),
        f"share of a step, n={EVERY}": one / EVERY / (step - one),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    rows = [measured(name, shadow, args.steps, args.words) for name, shadow in LISTS.items()]
    print(f"\n{args.steps} steps of the quickstart; {machine()}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
