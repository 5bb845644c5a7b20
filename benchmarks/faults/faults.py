"""`make faults`: causes every fault in a running job and prints the outcome.

    python -m benchmarks.faults.faults [NAME ...] [--patience SECONDS] [--out FILE]

Each fault gets its own run: the smallest model, asynchronous, a checkpoint every five steps. The
fault is injected after a few steps. Then the run must continue (or end as documented and be
resumed). It is stopped, and its ledger is audited from the last checkpoint: every group ever
admitted is live or left exactly once, and those that were consumed are those in the learner's own
log. "Lost" counts groups that left in another way, or that are consumed by the ledger but not by
that log; "twice" counts groups that were trained on more than once, or that would be assigned again
although they were trained on.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.faults import (
    fault_cases,  # noqa: F401  registers its faults
    fault_graders,  # noqa: F401  registers its faults
)
from benchmarks.faults.fault_kit import FAULTS
from benchmarks.faults.job import Job, audit
from benchmarks.harness import machine, table
from benchmarks.status import run_and_record


def run(name: str, root: Path) -> dict[str, Any]:
    """A row of the table: one fault from start to audit."""
    title, scenario = FAULTS[name]
    folder = root / name
    folder.mkdir()
    try:
        job, outcome = scenario(folder)
        code = job.stop()
        if code != 130:
            raise RuntimeError(
                f"{name}: stopping the run afterwards gave exit code {code}, not 130:\n"
                f"{job.text()[-2000:]}"
            )
        left = job.left()
        books = audit(job.run_dir)
    finally:
        while Job.started:
            Job.started.pop().kill_everything()
        while Job.afterwards:
            Job.afterwards.pop()()
    return {
        "injected": title,
        "what the user saw": "; ".join([outcome.saw, *outcome.notes])
        .replace("|", "/")
        .replace(str(root), ""),
        "groups": books.admitted,
        "lost": books.lost,
        "twice": books.twice,
        "staleness": f"{books.staleness:.0f}",
        "left over": len(left),
        "seconds to recover": "" if outcome.seconds is None else f"{outcome.seconds:.0f}",
    }


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replace rows in the table of a Markdown page, ordered as FAULTS; other rows stay."""
    begin, end = "<!-- table -->\n\n", "\n\n<!-- end of the table -->"
    before, _, rest = path.read_text().partition(begin)
    old, _, after = rest.partition(end)
    head, rule, *lines = table(rows).splitlines()
    by_title = {line.split(" | ")[0]: line for line in [*old.splitlines()[2:], *lines]}
    order = [by_title[f"| {title}"] for title, _ in FAULTS.values() if f"| {title}" in by_title]
    path.write_text(before + begin + "\n".join([head, rule, *order]) + end + after)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(FAULTS)}; default: all"
    )
    parser.add_argument(
        "--patience", type=float, default=Job.patience_s, help="deadline of every wait, seconds"
    )
    parser.add_argument("--out", help="also put the rows into the table of this Markdown page")
    chosen = parser.parse_args()
    Job.patience_s = chosen.patience
    root = Path(tempfile.mkdtemp(prefix="rlcore-faults-"))
    rows, failed = [], []
    for name in chosen.names or FAULTS:
        try:
            rows.append(run(name, root))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
        except Exception as e:  # try the next fault anyway; the exit code reports the failure
            failed.append(name)
            print(f"{name} FAILED: {type(e).__name__}: {e}", flush=True)
    text = table(rows) if rows else "no fault was run"
    print(f"\n{text}\n\n{machine()}")
    bad = [r["injected"] for r in rows if r["lost"] or r["twice"] or r["left over"]]
    if chosen.out and rows:
        write(Path(chosen.out), rows)
    shutil.rmtree(root / "warm", ignore_errors=True)
    if failed or bad:
        print(f"failed: {failed}; ledger or processes not clean after: {bad}; logs in {root}")
        return 1
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    run_and_record(main, __file__)
