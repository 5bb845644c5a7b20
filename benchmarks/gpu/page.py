"""The page of a check: what was shown, and what was not and why.

python benchmarks/gpu/page.py gpu_check_a.jsonl gpu_check_b.jsonl ... > benchmarks/results/FILE.md

Rows of one H100 are also recorded for docs/status.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from check import PARTS

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks import status

Row = dict[str, Any]
CHECK = tuple(p.name for p in PARTS)
RUNS = ("learns", "peers", "learner")  # of learns.py, beside_trl.py, learner_profile.py
NAMES = (*CHECK, *RUNS)


def page(rows: Sequence[Row]) -> str:
    """Markdown of all rows of all calls; parts of check.py that did not run are named where one
    did."""
    machines = [r for r in rows if r["part"] == "machine"]
    shown = [name for name in NAMES if measured(rows, name)]
    lines = ["# GPU check", "", "Each figure is one measurement.", "", *table(machines)]
    lines += ["", "## Not shown", "", *not_shown(rows)]
    for name in shown:
        lines += ["", f"## {name}", "", *tables(measured(rows, name))]
    return "\n".join(lines) + "\n"


def measured(rows: Sequence[Row], part: str) -> list[Row]:
    """The rows of a part that hold figures."""
    return [r for r in rows if r["part"] == part and "what" not in r]


def not_shown(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each part without figures, and for each that failed after some."""
    nothing = True
    for name in NAMES if {r["part"] for r in rows} & {*CHECK} else RUNS:
        why = [r["what"] for r in rows if r["part"] == name and "what" in r]
        if not measured(rows, name):
            nothing = False
            yield f"- `{name}`: {why[-1] if why else 'did not run'}"
        elif why:
            nothing = False
            yield f"- `{name}`, in part: {why[-1]}"
    if nothing:
        yield "Nothing: every part ran."


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """A table for each run of rows with equal columns."""
    group: list[Row] = []
    for row in rows:
        if group and [*group[0]] != [*row]:
            yield from table(group)
            yield ""
            group = []
        group.append(row)
    yield from table(group)


def table(rows: Sequence[Row]) -> list[str]:
    """Columns as in the first row, without the part's name."""
    if not rows:
        return []
    columns = [name for name in rows[0] if name != "part"]
    lines = [[cell(name) for name in columns], ["---"] * len(columns)]
    lines += [[cell(row.get(name, "")) for name in columns] for row in rows]
    return ["| " + " | ".join(words) + " |" for words in lines]


def cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")


# parts that other scripts than the check measure: script and page
RUNS = {
    status.PARTS["learns"]: ("learns.py", "gpu_runs_h100.md"),
    status.PARTS["peers"]: ("beside_trl.py", "gpu_runs_h100.md"),
    status.PARTS["learner"]: ("learner_profile.py", "gpu_runs_h100.md"),
}


def main() -> None:
    files = [Path(name) for name in sys.argv[1:]]
    if not files:
        sys.exit(__doc__)
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    print(page(rows), end="")
    if any(
        "H100" in row["device"] and row["gpus"] == 1 for row in rows if row["part"] == "machine"
    ):
        run = status.this_run("passed", status.versions_of(files))
        for what in status.measured(files):
            script, shown = RUNS.get(what, ("check.py", "gpu_h100.md"))
            status.record(what, "h100", f"benchmarks/gpu/{script}", shown, **run)


if __name__ == "__main__":
    main()
