"""The decision table: whole, in order, and as the estimator lab has it."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.evidence.estimator_lab import RESULTS
from benchmarks.evidence.estimator_lab_page import n_star
from rlcore.corrections.decisions import regimes, regimes_of, typical_n_star
from rlcore.corrections.specs import CORRECTIONS

EVIDENCE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "evidence"


def test_every_entry_can_hold_and_names_corrections_and_a_page_that_exist():
    for entry in regimes():
        assert set(entry.use) <= set(CORRECTIONS)
        assert (EVIDENCE / f"{entry.source}.md").is_file()
        figures = {n: low if low is not None else high for n, (low, high) in entry.when.items()}
        found = [e for e in regimes_of(figures) if e.topic == entry.topic]
        assert found == [entry]


def test_a_figure_that_was_not_measured_decides_nothing():
    assert [entry.regime for entry in regimes_of({})] == ["a moderate error"]


@pytest.mark.parametrize(("tokens", "answers"), [(1, 90), (8, 90), (64, 20), (4096, 20)])
def test_n_star_lies_between_those_of_the_lab(tokens, answers):
    assert typical_n_star(tokens) == pytest.approx(answers)
    assert 20 < typical_n_star(20) < 90


@pytest.mark.parametrize("length", [8, 64])
def test_n_star_is_that_of_the_labs_data(length):
    cells = json.loads(RESULTS.read_text())["cells"]
    own = [c["arms"] for c in cells if c["kind"] == "fixed" and c["length"] == length]
    found = np.mean([n_star(arms["tis C=10"], arms["none"]) for arms in own])
    assert typical_n_star(length) == pytest.approx(found, rel=0.1)
