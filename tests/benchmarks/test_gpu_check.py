"""How the GPU check spends its time: order, budget, and rows for whatever was not measured."""

import json
import subprocess
import time

import check
import pytest
import setting
from check import PARTS, Part, Rows


def run(chosen, child, *, device="cuda", budget_s=450.0):
    rows = []
    check.check(chosen, child, rows.append, device=device, budget_s=budget_s)
    return [(r["part"], r["what"]) for r in rows]


def test_a_failing_part_is_a_row_and_the_next_one_is_tried():
    tried = []

    def child(part, deadline_s):
        tried.append(part.name)
        return "the engine did not start" if part.name == "a" else None

    assert run([Part("a", 9, 1, ()), Part("b", 9, 1, ())], child) == [
        ("a", "failed: the engine did not start")
    ]
    assert tried == ["a", "b"]


def test_what_needs_a_gpu_or_a_package_is_skipped_saying_so():
    chosen = [Part("a", 9, 1, (), cuda=True), Part("b", 9, 1, ("torch", "no_such_package"))]
    found = run(chosen, lambda *_: pytest.fail("nothing can run"), device="cpu")
    assert found == [("a", "skipped: needs a GPU"), ("b", "skipped: no_such_package not installed")]


def test_the_budget_holds_whatever_the_parts_take(monkeypatch):
    now, given = [0.0], {}
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: name)

    def child(part, deadline_s):
        given[part.name] = deadline_s
        now[0] += deadline_s  # every part hangs until its deadline
        return "time"

    found = dict(run(PARTS, child))
    assert now[0] <= check.BUDGET_S < 480
    assert all(given[p.name] <= p.limit_s for p in PARTS if p.name in given)
    assert list(found) == [p.name for p in PARTS]
    assert found["update"].startswith("skipped: time") and {
        "kernel",
        "model",
        "bf16",
        "sparse",
    } < set(given)


@pytest.mark.processes
def test_a_child_past_its_deadline_is_killed_and_its_rows_stay(tmp_path, monkeypatch):
    stand_in = tmp_path / "parts.py"
    stand_in.write_text(
        "import subprocess, sys, time\n"
        'open(sys.argv[6], \'a\').write(\'{"part": "bf16", "context": 4096}\\n\')\n'
        "engine = subprocess.Popen(['sleep', '600'])\n"
        "print('began', engine.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(check, "HERE", tmp_path)
    rows = Rows(tmp_path / "rows.jsonl")
    why = check.run_child(Part("bf16", 9, 1, ()), 3.0, rows, tmp_path, "tiny", "cpu")
    assert why is not None and why.startswith("time (3 s), after: began")
    assert [json.loads(line)["context"] for line in rows.path.read_text().splitlines()] == [4096]
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", why.split()[-1]], capture_output=True, text=True
    ).stdout
    assert not state.strip() or state.startswith("Z")  # its own child was killed too


@pytest.mark.processes
def test_a_child_that_dies_says_why(tmp_path, monkeypatch):
    (tmp_path / "parts.py").write_text("raise ImportError('no kernel for this GPU')")
    monkeypatch.setattr(check, "HERE", tmp_path)
    why = check.run_child(
        Part("fp8", 30, 1, ()), 30.0, Rows(tmp_path / "rows.jsonl"), tmp_path, "tiny", "cpu"
    )
    assert why == "exit code 1: ImportError: no kernel for this GPU"


def test_shapes_are_those_that_can_be_asked_for():
    assert set(check.SHAPES) == set(setting.SHAPES)
