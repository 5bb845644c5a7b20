"""`make faults`: cause every fault for real in a running job, and print what came of it.

    python benchmarks/faults.py [NAME ...] [--patience SECONDS] [--out docs/faults.md]

Each fault gets a run of its own: the smallest model, asynchronous, a checkpoint every five steps. It is injected after
a few steps; then the run must go on (or end as promised and be resumed), is stopped, and its books are audited from
the last checkpoint: every group ever admitted is live or left exactly once, and those that left to be trained on are
those that the learner's own record names. "Lost" are groups that left in another way, or by the books but not by that
record; "twice" are groups trained on more than once, or that the books would hand out again.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import fault_cases  # noqa: F401  registers its faults
import fault_graders  # noqa: F401  registers its faults
from fault_kit import FAULTS
from harness import machine, table
from job import Job, audit


def run(name: str, root: Path) -> dict[str, Any]:
    """One fault from start to audit."""
    title, scenario = FAULTS[name]
    folder = root / name
    folder.mkdir()
    try:
        job, outcome = scenario(folder)
        code = job.stop()
        if code != 130:
            raise RuntimeError(f"{name}: the stop after it ended with {code}:\n{job.text()[-2000:]}")
        left = job.left()
        books = audit(job.run_dir)
    finally:
        while Job.started:
            Job.started.pop().kill_everything()
    return {
        "injected": title,
        "what the user saw": "; ".join([outcome.saw, *outcome.notes]).replace("|", "/").replace(str(root), ""),
        "groups": books.admitted,
        "lost": books.lost,
        "twice": books.twice,
        "staleness": f"{books.staleness:.0f}",
        "left over": len(left),
        "seconds to recover": "" if outcome.seconds is None else f"{outcome.seconds:.0f}",
    }


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Put rows into the table of a Markdown page; its rows of other faults stay, in the order of the register."""
    begin, end = "<!-- table -->\n\n", "\n\n<!-- end of the table -->"
    before, _, rest = path.read_text().partition(begin)
    old, _, after = rest.partition(end)
    head, rule, *lines = table(rows).splitlines()
    by_title = {line.split(" | ")[0]: line for line in [*old.splitlines()[2:], *lines]}
    order = [by_title[f"| {title}"] for title, _ in FAULTS.values() if f"| {title}" in by_title]
    path.write_text(before + begin + "\n".join([head, rule, *order]) + end + after)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FAULTS)}; default: all")
    parser.add_argument("--patience", type=float, default=Job.patience_s, help="seconds any one wait may take")
    parser.add_argument("--out", help="also put the rows into the table of this Markdown page")
    chosen = parser.parse_args()
    Job.patience_s = chosen.patience
    root = Path(tempfile.mkdtemp(prefix="rlcore-faults-"))
    rows, failed = [], []
    for name in chosen.names or FAULTS:
        try:
            rows.append(run(name, root))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
        except Exception as e:  # the next fault is tried all the same; the exit code tells
            failed.append(name)
            print(f"{name} FAILED: {type(e).__name__}: {e}", flush=True)
    text = table(rows) if rows else "nothing ran"
    print(f"\n{text}\n\n{machine()}")
    bad = [r["injected"] for r in rows if r["lost"] or r["twice"] or r["left over"]]
    if chosen.out and rows:
        write(Path(chosen.out), rows)
    shutil.rmtree(root / "warm", ignore_errors=True)
    if failed or bad:
        print(f"failed: {failed}; books or processes not clean after: {bad}; logs under {root}")
        return 1
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
