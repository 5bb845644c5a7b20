"""The tiers' rules hold in pytest itself, on a small suite in a process of its own."""

import contextlib
import os
import re
import subprocess
import sys
import time
from itertools import pairwise

import pytest
import tiers
from structure import ROOT
from timing import deadline

import changes

SUITE = {
    "test_a.py": "def test_one(): pass\ndef test_two(): pass\n",
    "test_b.py": (
        "import pytest\n@pytest.mark.cluster\ndef test_dear(): pass\ndef test_cheap(): pass\n"
    ),
    "test_c.py": "def test_three(): pass\n",
}
MARKS = "".join(f"  {mark}: ...\n" for mark in ("slow", "nightly", *tiers.TIMEOUTS_S))


DONE = subprocess.CompletedProcess([], 1)


@pytest.fixture
def suite(tmp_path):
    """Runs pytest on files; returns (exit code, output)."""
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{MARKS}")

    def run(*words, files=SUITE, **environment):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-v", "-p", "tier_plugin", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{tmp_path}", **environment},
            capture_output=True,
            text=True,
            timeout=deadline(60),
        )
        return done.returncode, done.stdout + done.stderr

    return run


def order(output):
    return re.findall(r"^(test_\w+\.py::\w+) PASSED", output, re.MULTILINE)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_a_part_above_its_budget_fails_and_names_the_dearest(suite, workers):
    burn = (
        "import time\nimport pytest\n"
        "@pytest.mark.parametrize('i', range(12))\ndef test_burn(i):\n"
        "    until = time.process_time() + 0.02 * (i + 1)\n"
        "    while time.process_time() < until: pass\n"
    )
    small = "from tiers import PARTS, Part\nPARTS['fast'] = Part('', 1, {})\n"
    words = ["-p", "small", "--budget", "fast", "-n", str(workers), "test_burn.py"]
    quiet = {"RLCORE_TEST_SLOWNESS": "1 2"}
    files = {"test_burn.py": burn, "small.py": small.format(0.5)}
    code, output = suite(*words, files=files, **quiet)
    assert code == 1 and "12 passed" in output
    (sentence,) = re.findall(r"The tests of fast took .*", output)
    named = re.findall(r"test_burn\[(\d+)\]", sentence)
    assert len(named) == 10 and set(named) >= {"10", "11"}
    code, output = suite(*words, files=files, RLCORE_TEST_SLOWNESS="1 5")
    assert code == 0 and "Other programs keep this machine busy" in output
    code, output = suite(*words, files={"small.py": small.format(500)})
    assert code == 0 and "The tests of fast took" not in output


@pytest.mark.processes
def test_children_count_for_a_budget(suite):
    child = (
        "import subprocess, sys\ndef test_child():\n"
        "    program = 'import time\\nwhile time.process_time() < 0.6: pass'\n"
        "    subprocess.run([sys.executable, '-c', program], check=True)\n"
    )
    small = "from tiers import PARTS, Part\nPARTS['fast'] = Part('', 1, 0.3)\n"
    files = {"test_child.py": child, "small.py": small}
    # a machine as fast as the reference, whatever this one is
    calibrated = {"RLCORE_TEST_SLOWNESS": "1 1"}
    code, output = suite("-p", "small", "--budget", "fast", files=files, **calibrated)
    assert code == 1 and "test_child.py::test_child (1 s)" in output
    slower = {"RLCORE_TEST_SLOWNESS": "4 4"}
    assert suite("-p", "small", "--budget", "fast", files=files, **slower)[0] == 0


@pytest.mark.processes
def test_a_file_without_a_test_of_the_part_is_not_imported(suite):
    head = "import pytest\npytestmark = [pytest.mark.ranks]\n"
    files = {**SUITE, "test_d.py": f"{head}def test_four(): pass\n"}
    names = {"fast": ["a", "b", "c"], "started": ["b", "d"], "processes": []}
    for part, wanted in names.items():
        broken = {
            name: text if name[5] in wanted else f"{text}raise ImportError\n"
            for name, text in files.items()
        }
        code, output = suite("-m", tiers.PARTS[part].marks, files=broken)
        assert code == (0 if wanted else 5), output
        assert sorted({test[5] for test in order(output)}) == wanted


@pytest.mark.processes
def test_nothing_starts_after_the_time_and_what_did_not_is_printed(suite):
    code, output = suite("--until", "0")
    assert code == 0 and order(output) == []
    assert set(re.findall(r"is spent: (\S+)", output)) == {
        "test_a.py::test_one",
        "test_a.py::test_two",
        "test_b.py::test_cheap",
        "test_b.py::test_dear",
        "test_c.py::test_three",
    }


@pytest.mark.processes
def test_a_test_of_minutes_starts_only_while_a_third_of_its_limit_is_left(suite):
    long = (
        "import pytest\ndef test_usual(): pass\n@pytest.mark.timeout(9000)\ndef test_long(): pass\n"
    )
    calibrated = {"RLCORE_TEST_SLOWNESS": "1 1"}
    for left, started in ((2000, ["test_long.py::test_usual"]), (4000, None)):
        words = ("--until", str(time.time() + left), "test_long.py")
        code, output = suite(*words, files={"test_long.py": long}, **calibrated)
        every = ["test_long.py::test_usual", "test_long.py::test_long"]
        assert code == 0 and order(output) == (started or every)
        assert ("is spent: test_long.py::test_long" in output) == (started is not None)


@pytest.mark.processes
def test_cheap_tests_come_first_and_changed_files_before_all(suite):
    assert order(suite()[1])[-1] == "test_b.py::test_dear"
    changed = order(suite("--changed", "test_b.py", "--shard", "2/3")[1])
    assert changed == ["test_b.py::test_cheap", "test_b.py::test_dear", "test_c.py::test_three"]


@pytest.mark.processes
def test_the_shares_hold_every_file_once(suite):
    shares = [order(suite("--shard", f"{k}/2")[1]) for k in range(2)]
    assert sorted(shares[0] + shares[1]) == sorted(order(suite()[1]))


@pytest.mark.processes
def test_a_seed_gives_an_order_that_keeps_files_together(suite):
    files = {f"test_{c}.py": "".join(f"def test_{i}(): pass\n" for i in range(5)) for c in "defg"}
    first, again, other = (order(suite("--shuffle", s, files=files)[1]) for s in "113")
    assert first == again != other and sorted(first) == sorted(other) != first
    names = [test.partition("::")[0] for test in first]
    assert len([1 for a, b in pairwise(names) if a != b]) == len(set(names)) - 1


@pytest.mark.processes
def test_a_test_that_hangs_ends_after_the_scaled_timeout_of_its_kind(suite):
    hangs = "import threading\ndef test_hangs(): threading.Event().wait()\n"
    small = "import tiers\ntiers.TIMEOUT_S = 0.5\n"
    files = {"test_hangs.py": hangs, "small.py": small}
    calibrated = {"RLCORE_TEST_SLOWNESS": "1 2"}
    code, output = suite("-p", "small", "test_hangs.py", files=files, **calibrated)
    assert code == 1 and "Timeout (>1.0s)" in output


def test_tests_belong_to_what_they_import_themselves_or_by_one_module_or_by_helpers():
    assert "tests/loop/test_pace.py" in changes.tests_of(["rlcore/loop/saver.py"])
    assert "tests/config/test_config_compose.py" in changes.tests_of(["rlcore/config/groups.py"])
    assert changes.tests_of(["tests/test_seeding.py", "docs/index.md"]) == ["tests/test_seeding.py"]
    helped = changes.tests_of(["tests/buffer/buffer_helpers.py"])
    assert helped and all(name.startswith("tests/buffer/") for name in helped)
    assert "tests/commands/test_train.py" in changes.tests_of(["tests/commands/conftest.py"])


@pytest.mark.processes
def test_a_base_that_is_unknown_runs_the_share_alone(capsys):
    with pytest.raises(changes.UnknownCommit, match="f00f00 is not a commit"):
        changes.tests_since("f00f00")
    asked = tiers._asked(["rest", "--base", "f00f00", "--shard", "9", "--", "-x"])
    assert asked.pytest == ["-x"]
    words = tiers._selection(asked)
    assert words[words.index("--shard") + 1] == "3/6" and words[-1] == ""
    assert "f00f00 is not a commit of this checkout" in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.parametrize("left", ["0", "-31"])
def test_a_budget_that_is_spent_starts_nothing_says_so_and_is_no_failure(left):
    words = ["make", "-o", "venv", "test-rest", f"BUDGET_S={left}", "BASE=HEAD"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=deadline(60))
    assert done.returncode == 0, done.stderr
    assert f"no slow test is started: {left} s are left" in done.stdout
    assert "tests: slow" not in done.stdout  # pytest was not started


@pytest.mark.parametrize(("tier", "room"), [("rest", 2), ("slow", 1), ("test", 2)])
def test_slow_tests_of_ci_wait_as_long_as_tests_that_run_side_by_side(monkeypatch, tier, room):
    found = []
    monkeypatch.setattr(tiers.timing, "crowd", found.append)
    monkeypatch.setattr(tiers, "_selection", lambda asked: ["--shard", "0/6"])
    monkeypatch.setattr(tiers, "_run", lambda *words, **more: 5)  # before mypy is waited for
    monkeypatch.setattr(tiers, "_types", lambda wanted: contextlib.nullcontext())
    assert tiers.main([tier]) == 5
    assert found == [room]


@pytest.mark.parametrize(("tier", "settled"), [("rest", True), ("test", True), ("slow", False)])
def test_what_decides_draws_the_same_examples_each_time(monkeypatch, tier, settled):
    found = []
    monkeypatch.setattr(tiers.timing, "crowd", lambda programs: None)
    monkeypatch.setattr(tiers, "_selection", lambda asked: ["--shard", "0/6"])
    monkeypatch.setattr(tiers.subprocess, "run", lambda words, **more: found.append(words) or DONE)
    monkeypatch.setattr(tiers, "_types", lambda wanted: contextlib.nullcontext())
    assert tiers.main([tier]) == 1
    assert ("--hypothesis-profile=settled" in found[0]) == settled
