"""Executes notebooks and keeps what their cells show: `python docs/notebooks.py NAME...`, in a new
process each, in a folder that holds the data of docs/notebooks/ and, afterwards, the runs.

A cell runs as in a notebook: in one namespace, beside an event loop; its last expression is shown.
The path of the folder is left out of what is kept. The metadata keep a digest of the sources;
tests/test_notebooks.py fails when a cell is newer.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import hashlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "notebooks"
Cell = dict[str, Any]


def code_cells(notebook: Cell) -> list[Cell]:
    """The code cells, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def digest(notebook: Cell) -> str:
    """A digest of the sources of all code cells."""
    text = json.dumps(["".join(cell["source"]) for cell in code_cells(notebook)])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def outputs(source: str, names: dict[str, Any], count: int) -> list[Cell]:
    """What one cell prints and shows, in nbformat 4. Raises what the cell raises."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    shown = []
    if lines := _lines(printed.getvalue()):
        shown.append({"output_type": "stream", "name": "stdout", "text": lines})
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = _lines(value._repr_html_())
        result = {"output_type": "execute_result", "execution_count": count, "metadata": {}}
        shown.append({**result, "data": data})
    return shown


def _lines(text: str) -> list[str]:
    return text.replace(f"{Path.cwd()}/", "").splitlines(keepends=True)


async def execute(path: Path) -> None:
    """Run every cell of a notebook, and write what they show into it."""
    notebook, names = json.loads(path.read_text()), {}
    for count, cell in enumerate(code_cells(notebook), start=1):
        cell["outputs"] = outputs("".join(cell["source"]), names, count)
        cell["execution_count"] = count
    notebook["metadata"]["executed"] = digest(notebook)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def main(names: list[str]) -> None:
    """Execute these notebooks, by default all, in the folder runs/notebooks."""
    scratch = FOLDER.parents[1] / "runs" / "notebooks"
    scratch.mkdir(parents=True, exist_ok=True)
    for data in FOLDER.glob("*.jsonl"):
        shutil.copy(data, scratch)
    for path in [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb")):
        subprocess.run([sys.executable, __file__, str(path)], cwd=scratch, check=True)


if __name__ == "__main__":
    if Path(sys.argv[-1]).suffix == ".ipynb":
        asyncio.run(execute(Path(sys.argv[-1])))
    else:
        main(sys.argv[1:])
