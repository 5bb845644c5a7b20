"""Every row of benchmarks/results/faults_cpu.md: the fault in a real run, recovery, and audit.

benchmarks/faults/faults.py declares the rows and writes the table. All of them run every night;
`--turn N` selects two that rotate with N, for `make test-slow` and its like."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from timing import deadline

from benchmarks.faults import faults
from benchmarks.faults.job import Job

ROOT = Path(__file__).resolve().parents[2]
ROWS = {name: title for name, (title, _) in faults.FAULTS.items()}
A_TURN = 2
TURNS = -(-len(ROWS) // A_TURN)


def of_turn(turn):
    """The rows of a turn; TURNS turns in a row have all of them."""
    names = list(ROWS)
    return {names[(A_TURN * turn + i) % len(names)] for i in range(A_TURN)}


def pytest_generate_tests(metafunc):
    if "row" in metafunc.fixturenames:
        turn = metafunc.config.getoption("--turn")
        now = set() if turn is None else of_turn(turn)
        marks = {name: () if name in now else pytest.mark.nightly for name in ROWS}
        metafunc.parametrize("row", [pytest.param(n, marks=m) for n, m in marks.items()])


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(1800)  # whole runs: up to two, each until it has started and recovered
def test_a_fault_costs_no_group_and_leaves_no_process(row, tmp_path, monkeypatch):
    monkeypatch.setattr(Job, "patience_s", deadline(Job.patience_s))
    found = faults.run(row, tmp_path)
    assert found["what the user saw"]
    assert (found["lost"], found["twice"], found["left over"]) == (0, 0, 0), found
    assert found["groups"] > 0 and int(found["staleness"]) <= 1, found


def test_the_page_has_a_line_for_every_row_and_no_other():
    table = (ROOT / "benchmarks/results/faults_cpu.md").read_text().partition("<!-- table -->")[2]
    titles = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)[2:]  # without the head
    assert titles == list(ROWS.values())


@pytest.mark.processes
def test_every_row_has_its_test_and_every_turn_two():
    words = ["-m", "pytest", "--collect-only", "-p", "no:cacheprovider"]
    file = str(Path(__file__).relative_to(ROOT))

    def collected(*more):
        done = subprocess.run(
            [sys.executable, *words, *more, file],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=deadline(60),
        )
        return re.findall(r"::test_a_fault_costs\w+\[(\w+)\]", done.stdout)

    assert collected("-m", "cluster") == list(ROWS)
    assert set(collected("-m", "slow and not nightly", "--turn", "3")) == of_turn(3)
    assert collected("-m", "slow and not nightly") == []
    assert set().union(*map(of_turn, range(7, 7 + TURNS))) == set(ROWS)
