"""Programs graded per second, through the path of a run: scorer, grading processes, sandbox.

    python -m benchmarks.speed.code_graders [--file FILE.jsonl] [--programs 800] [--wrong 0.5]
                                      [--processes 1 2] [--tests 1 3 9]

The file has LeetCode-style rows with solutions. A share of the programs fails immediately (they do
not define what is tested), as most programs do early in training; the others run all their tests.
The second table is of right programs that read standard input and print, which have a process for
each test: by their number of tests. Its last column is what all processes used, this one too.
The last line is the rate of empty programs: the cost of forking, confining and removing a process.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, table
from benchmarks.status import run_and_record
from rlcore.graders.sandbox import Limits, Sandbox
from rlcore.tasks import format_prompt_id, make_task
from rlcore.tasks.scoring import Scorer
from rlcore.tasks.specs import EvalTaskSpec, GradingSpec
from rlcore.testing.records import make_answer
from rlcore.types import Answer, Score

READS = "n = int(input())\nprint(sum(map(int, input().split())) + n)"
WRONG = "```python\nclass Solution:\n    pass\n```"


def answers(name: str, texts: list[str], problems: int) -> list[Answer]:
    """One answer for each text, to the problems in turn."""
    return [
        make_answer(i, 0, text, prompt_id=format_prompt_id(name, "train", i % problems))
        for i, text in enumerate(texts)
    ]


def graded(
    spec: EvalTaskSpec, programs: int, wrong: float, processes: int
) -> dict[str, float | int | str]:
    """Grade `programs` answers, the first `wrong` of every ten wrong: one row of the table."""
    task = make_task(spec.name, spec.args)
    problems = task.size("train") or 1
    items = [task.item("train", i) for i in range(problems)]
    texts = [
        WRONG if i % 10 < 10 * wrong else task.worked_answer(items[i % problems]) or ""
        for i in range(programs)
    ]
    done: list[tuple[Answer, Score]] = []
    scorer = Scorer(
        {spec.name: spec}, GradingSpec(grader_processes=processes), on_scored=done.extend
    )
    try:
        # the first answers start the processes and their sandboxes
        scorer.submit(answers(spec.name, texts[:processes], problems))
        scorer.drain(120)
        done.clear()
        start = time.monotonic()
        scorer.submit(answers(spec.name, texts, problems))
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


def reading(folder: Path, tests: int) -> EvalTaskSpec:
    """A task of programs that read and print, with so many tests each."""
    inputs = [f"{n}\n1 2 {n}\n" for n in range(tests)]
    expected = {"inputs": inputs, "outputs": [f"{2 * n + 3}\n" for n in range(tests)]}
    row = {"question": "Add.", "solutions": [READS], "input_output": json.dumps(expected)}
    file = folder / f"{tests}.jsonl"
    file.write_text(json.dumps(row))
    args: dict[str, Any] = {"train_path": str(file), "proof_cache": str(folder)}
    return EvalTaskSpec(name="stdin_code", args=args)


def by_tests(tests: list[int], programs: int, processes: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for count in tests:
            spec = reading(Path(folder), count)
            before = cpu_s()
            row = graded(spec, programs, 0.0, processes)
            used = 1000 * (cpu_s() - before) / programs
            rows.append({"tests": count, **row, "CPU ms a solution": used})
    return rows


def cpu_s() -> float:
    """Of this process and of those that have ended and that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


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
    parser.add_argument("--file", help="without it the first table is left out")
    parser.add_argument("--programs", type=int, default=800)
    parser.add_argument("--wrong", type=float, nargs="+", default=[0.0, 0.5])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tests", type=int, nargs="+", default=[1, 3, 9])
    args = parser.parse_args()
    print(f"\nPrograms in the sandbox on {machine()}\n")
    if args.file:
        spec = EvalTaskSpec(name="leetcode", args={"train_path": args.file})
        rows = [graded(spec, args.programs, w, p) for w in args.wrong for p in args.processes]
        print(table(rows))
    print(table(by_tests(args.tests, args.programs, max(args.processes))))
    print(f"\nEmpty programs, one at a time: {empty_programs(args.programs):.0f} a second.")


if __name__ == "__main__":
    run_and_record(main, __file__)
