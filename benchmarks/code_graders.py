"""Programs judged per second, through the whole path of a run: scorer, grading processes, sandbox.

    python benchmarks/code_graders.py --file FILE.jsonl [--programs 800] [--wrong 0.5] [--processes 1 2]

The file has LeetCode-style rows with solutions. A share of the programs is wrong at once (they do not define what is
tested), as most are early in training; the others run all their tests. "does nothing" is what an empty program costs:
the fork, its confinement and its removal.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from harness import machine, table

from rlcore.tasks import format_prompt_id, make_task
from rlcore.tasks.sandbox import Limits, Sandbox
from rlcore.tasks.scoring import Scorer
from rlcore.types import Trajectory

WRONG = "```python\nclass Solution:\n    pass\n```"


def sample(number: int, problem: int) -> Trajectory:
    """One of which the scorer needs the prompt's name and the response: its one token is the text's number."""
    one = np.zeros(1, np.int32)
    return Trajectory(
        prompt_ids=one,
        response_ids=one + number,
        logp_inf=one.astype(np.float32),
        topk_ids=np.zeros((1, 0), np.int32),
        topk_logp=np.zeros((1, 0), np.float32),
        token_version=one,
        actor_id="none",
        actor_kind="bf16",
        group_id=number,
        prompt_id=format_prompt_id("leetcode", "train", problem),
        sample_index=0,
        finish_reason="stop",
    )


def graded(file: str, programs: int, wrong: float, processes: int) -> dict[str, float | int | str]:
    """Grade `programs` answers, the first `wrong` of every ten wrong: one row of the table."""
    task = make_task("leetcode", {"train_path": file})
    problems = task.size("train") or 1
    items = [task.item("train", i) for i in range(problems)]
    texts = [WRONG if i % 10 < 10 * wrong else task.worked_answer(items[i % problems]) or "" for i in range(programs)]
    done: list[Trajectory] = []
    scorer = Scorer(
        {"leetcode": ("leetcode", {"train_path": file})},
        lambda ids: texts[ids[0]],
        processes=processes,
        timeout_s=10.0,
        on_scored=done.extend,
    )
    try:
        scorer.submit([sample(i, i % problems) for i in range(processes)])  # starts the processes and their sandboxes
        scorer.drain(120)
        done.clear()
        start = time.monotonic()
        scorer.submit([sample(i, i % problems) for i in range(programs)])
        scorer.drain(3600)
        seconds = time.monotonic() - start
    finally:
        scorer.close()
    right = [t for t in done if texts[t.response_ids[0]] != WRONG]
    return {
        "processes": processes,
        "programs": programs,
        "wrong": wrong,
        "solutions/s": programs / seconds,
        "right ones that passed": sum(t.reward == 1.0 for t in right),
        "of": len(right),
        "wrong ones that passed": sum(t.reward == 1.0 for t in done) - sum(t.reward == 1.0 for t in right),
        "failed scores": sum(t.score_status != "ok" for t in done),
    }


def does_nothing(programs: int) -> float:
    """Empty programs per second in one sandbox, without scorer and task."""
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
    print(f"\nA program that does nothing: {does_nothing(args.programs):.0f} a second, one at a time.")


if __name__ == "__main__":
    main()
