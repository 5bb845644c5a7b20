"""Programs graded per second, through the path of a run: scorer, grading processes, sandbox.

    python benchmarks/code_graders.py --file FILE.jsonl [--programs 800] [--wrong 0.5]
                                      [--processes 1 2]

The file has LeetCode-style rows with solutions. A share of the programs fails immediately (they do
not define what is tested), as most programs do early in training; the others run all their tests.
The last line is the rate of empty programs: the cost of forking, confining and removing a process.
"""

from __future__ import annotations

import argparse
import time

from harness import machine, table

from rlcore.tasks import format_prompt_id, make_task
from rlcore.tasks.sandbox import Limits, Sandbox
from rlcore.tasks.scoring import Scorer
from rlcore.tasks.specs import EvalTaskSpec, GradingSpec
from rlcore.testing.records import make_answer
from rlcore.types import Answer, Score

WRONG = "```python\nclass Solution:\n    pass\n```"


def answers(texts: list[str], problems: int) -> list[Answer]:
    """One answer for each text, to the problems in turn."""
    return [
        make_answer(i, 0, text, prompt_id=format_prompt_id("leetcode", "train", i % problems))
        for i, text in enumerate(texts)
    ]


def graded(file: str, programs: int, wrong: float, processes: int) -> dict[str, float | int | str]:
    """Grade `programs` answers, the first `wrong` of every ten wrong: one row of the table."""
    task = make_task("leetcode", {"train_path": file})
    problems = task.size("train") or 1
    items = [task.item("train", i) for i in range(problems)]
    texts = [
        WRONG if i % 10 < 10 * wrong else task.worked_answer(items[i % problems]) or ""
        for i in range(programs)
    ]
    done: list[tuple[Answer, Score]] = []
    scorer = Scorer(
        {"leetcode": EvalTaskSpec(name="leetcode", args={"train_path": file})},
        GradingSpec(grader_processes=processes),
        on_scored=done.extend,
    )
    try:
        # the first answers start the processes and their sandboxes
        scorer.submit(answers(texts[:processes], problems))
        scorer.drain(120)
        done.clear()
        start = time.monotonic()
        scorer.submit(answers(texts, problems))
        scorer.drain(3600)
        seconds = time.monotonic() - start
    finally:
        scorer.close()
    right = [score for answer, score in done if answer.text != WRONG]
    failing = [score for answer, score in done if answer.text == WRONG]
    return {
        "processes": processes,
        "programs": programs,
        "wrong": wrong,
        "solutions/s": programs / seconds,
        "right ones that passed": sum(score.reward == 1.0 for score in right),
        "of": len(right),
        "wrong ones that passed": sum(score.reward == 1.0 for score in failing),
        "failed scores": sum(score.status != "ok" for _, score in done),
    }


def empty_programs(programs: int) -> float:
    """Empty programs per second in one sandbox, without scorer or task."""
    sandbox = Sandbox(Limits())
    try:
        sandbox.run("")
        start = time.monotonic()
        for _ in range(programs):
            sandbox.run("")
        return programs / (time.monotonic() - start)
    finally:
        sandbox.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", required=True)
    parser.add_argument("--programs", type=int, default=800)
    parser.add_argument("--wrong", type=float, nargs="+", default=[0.0, 0.5])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    rows = [graded(args.file, args.programs, w, p) for w in args.wrong for p in args.processes]
    print(f"\nPrograms in the sandbox on {machine()}\n")
    print(table(rows))
    print(f"\nEmpty programs, one at a time: {empty_programs(args.programs):.0f} a second.")


if __name__ == "__main__":
    main()
