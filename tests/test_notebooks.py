"""The cells of every notebook, run in order in one process with an event loop, as notebooks do."""

import asyncio
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
DIAGNOSE = FOLDER / "diagnose.ipynb"  # trains nothing
NOTEBOOKS = sorted({*FOLDER.glob("*.ipynb")} - {DIAGNOSE})


def cells(notebook):
    """Code cells, of a run of two steps from a start that is hardly warmed up."""
    found = [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
    assert not any(c["outputs"] for c in found)
    texts = ["".join(c["source"]) for c in found]
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


def test_the_notebook_on_samples_of_another_trainer_runs(monkeypatch, capsys):
    monkeypatch.chdir(FOLDER)
    found = [c for c in json.loads(DIAGNOSE.read_text())["cells"] if c["cell_type"] == "code"]
    assert not any(c["outputs"] for c in found)
    names = {}
    for cell in found:
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
