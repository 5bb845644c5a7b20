"""Notebooks run, and hold what their cells show."""

import ast
import asyncio
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "docs"))
from notebooks import code_cells, digest

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
DIAGNOSE = FOLDER / "diagnose.ipynb"  # trains nothing
NOTEBOOKS = sorted({*FOLDER.glob("*.ipynb")} - {DIAGNOSE})


def cells(notebook):
    """Code cells, of a run of two steps from a start that is hardly warmed up."""
    texts = ["".join(cell["source"]) for cell in code_cells(json.loads(notebook.read_text()))]
    short = re.sub(r"\bSTEPS(, \w+)? = \d+", r"STEPS\1 = 2", texts[0])
    assert short != texts[0]
    small = ["model.warmup.steps=20", "model.fresh.layers=1", "evaluation.prompts=8"]
    preamble = f"import functools, rlcore\nrlcore.train = functools.partial(_train, words={small})"
    return [preamble, short, *texts[1:]]


def execute(notebook):
    import rlcore

    train = rlcore.train

    def shorter(experiment, overrides, *, words, **keys):
        return train(experiment, [*overrides, *words, "logging.wandb=disabled"], **keys)

    async def loop():
        names = {"_train": shorter}
        for text in cells(Path(notebook)):
            exec(text, names)

    asyncio.run(loop())


def shows(source):
    tree = ast.parse(source)
    called = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    return isinstance(tree.body[-1], ast.Expr) or not called.isdisjoint({"print", "rlcore.train"})


@pytest.mark.parametrize("notebook", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_holds_what_its_present_cells_show(notebook):
    """Else: `python docs/notebooks.py NAME`."""
    text = notebook.read_text()
    found = json.loads(text)
    assert found["metadata"]["executed"] == digest(found)
    assert all(cell["outputs"] for cell in code_cells(found) if shows("".join(cell["source"])))
    kinds = {output["output_type"] for cell in code_cells(found) for output in cell["outputs"]}
    assert kinds <= {"stream", "execute_result"}
    assert not re.search(r"(?<![\w.<>:/])/[a-z]\w*/|Traceback", text)
    assert len(text) < 200_000


def test_the_notebook_on_samples_of_another_trainer_runs(monkeypatch, capsys):
    monkeypatch.chdir(FOLDER)
    names = {}
    for cell in code_cells(json.loads(DIAGNOSE.read_text())):
        exec("".join(cell["source"]), names)
    # every other token is 0.3 nats off
    assert names["shown"]["kl_k3"] == pytest.approx(0.5 * (math.expm1(0.3) - 0.3), rel=0.3)
    assert names["found"]._repr_html_() and "version" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_to_its_end(notebook, tmp_path):
    command = [sys.executable, __file__, str(notebook)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    if notebook.stem == "compare":
        assert "AIS" in (tmp_path / "runs" / "compare.svg").read_text().upper()


if __name__ == "__main__":
    execute(sys.argv[1])
