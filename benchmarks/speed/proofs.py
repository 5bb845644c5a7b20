"""Metamath proofs judged per second, through the path of a run: scorer, grading processes, checker.

    python -m benchmarks.speed.proofs [--proofs 1000] [--processes 1 2]

Every theorem is another, so that no verdict is remembered. `wrong` of the answers are the proofs of
other theorems of the same form, which the checker must refuse.
"""

from __future__ import annotations

import argparse
import os
import time

from benchmarks.harness import machine, table
from benchmarks.status import run_and_record
from rlcore.tasks import format_prompt_id, make_task
from rlcore.tasks.scoring import Scorer
from rlcore.tasks.specs import EvalTaskSpec, GradingSpec
from rlcore.testing.records import make_answer
from rlcore.types import Answer, Score


def graded(proofs: int, wrong: float, processes: int) -> dict[str, float | int]:
    """Judge `proofs` answers, the first `wrong` of every ten wrong: one row of the table."""
    task = make_task("metamath", {})
    # Small forms are used up first. Behind them eight large ones take turns, so that theorems
    # eight apart are of one form.
    first = 4000
    place = {i: first + i for i in range(proofs)}
    texts = [
        task.item("train", place[i] + (8 if i % 10 < 10 * wrong else 0)).answer
        for i in range(proofs)
    ]
    answers = [
        make_answer(i, 0, text, prompt_id=format_prompt_id("metamath", "train", place[i]))
        for i, text in enumerate(texts)
    ]
    done: list[tuple[Answer, Score]] = []
    scorer = Scorer(
        {"metamath": EvalTaskSpec(name="metamath")},
        GradingSpec(grader_processes=processes),
        on_scored=done.extend,
    )
    try:
        scorer.submit(answers[: 2 * processes])  # starts the processes
        scorer.drain(120)
        done.clear()
        start = time.monotonic()
        scorer.submit(answers)
        scorer.drain(600)
        seconds = time.monotonic() - start
    finally:
        scorer.close()
    return {
        "processes": processes,
        "proofs": proofs,
        "wrong": wrong,
        "proofs/s": proofs / seconds,
        "proved": sum(score.reward == 1.0 for _, score in done),
        "sent to the checker": sum(score.parts["whole"] == 1.0 for _, score in done),
        "failed scores": sum(score.status != "ok" for _, score in done),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--proofs", type=int, default=1000)
    parser.add_argument("--wrong", type=float, nargs="+", default=[0.0, 0.5])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    rows = [graded(args.proofs, w, p) for w in args.wrong for p in args.processes]
    print(f"\nProofs judged by metamath on {machine()}, load {os.getloadavg()[0]:.0f}\n")
    print(table(rows))


if __name__ == "__main__":
    run_and_record(main, __file__)
