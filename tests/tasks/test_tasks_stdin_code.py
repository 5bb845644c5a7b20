"""Programs on standard input, run for real."""

import base64
import json
import pickle
import zlib

import pytest
from timing import deadline

from rlcore.errors import UserError
from rlcore.tasks import make_task

pytestmark = pytest.mark.processes
ADD = "import sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())))"
CASES = {"inputs": ["1 2\n3 4\n", "5 5", ["7", "8"]], "outputs": ["3\n7 \n", "10", "7\n8\n"]}
ROW = {"question": "Add each line.", "solutions": json.dumps([ADD])}


def task(tmp_path, cases, *, row=ROW, **args):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**row, "input_output": json.dumps(cases)}) + "\n")
    given = {"train_path": str(path), "proof_cache": str(tmp_path / "proofs"), **args}
    return make_task("stdin_code", {"timeout_s": deadline(5), **given})


def rewards(built, *programs):
    try:
        item = built.item("train", 0)
        return [built.grade(item, f"```python\n{p}\n```").reward for p in programs]
    finally:
        built.close()


def test_programs_are_judged_by_what_they_print(tmp_path):
    ways = [
        ADD,
        "for line in open(0):\n    print(sum(map(int, line.split())), end='  \\n\\n')",
        "import os, sys\nfor line in sys.stdin.buffer.read().split(b'\\n'):\n"
        "    if line: os.write(1, b'%d\\n' % sum(map(int, line.split())))\nexit()",
        "def main():\n    try:\n        while True: print(sum(map(int, input().split())))\n"
        "    except EOFError: pass\nif __name__ == '__main__': main()",
    ]
    wrong = ["print(3)", "pass", "import os; os._exit(0)", "print('1' * (5 << 20))", "1 / 0"]
    assert rewards(task(tmp_path, CASES), *ways) == [1.0] * len(ways)
    assert rewards(task(tmp_path, CASES), *wrong) == [0.0] * len(wrong)


def test_partial_credit_is_the_share_of_tests(tmp_path):
    built = task(tmp_path, CASES, partial_credit=True)
    assert rewards(built, ADD, "print(10)", "raise AssertionError('passed 3 of 3 tests')") == [
        1.0,
        pytest.approx(1 / 3),
        0.0,
    ]


def test_numbers_have_a_tolerance_and_outputs_alternatives(tmp_path):
    cases = {"inputs": ["", ""], "outputs": [["0.5 yes", "no"], "0.5 yes"]}
    row = {**ROW, "solutions": "print('0.50 yes')"}
    built = task(tmp_path, cases, row=row, partial_credit=True)
    found = rewards(built, "print(0.5000000001, 'yes')", "print('no')", "print(0.51, 'yes')")
    assert found == [1.0, 0.5, 0.0]
    big = task(tmp_path, {"inputs": [""], "outputs": [str(10**17)]}, worked_field=None)
    assert rewards(big, f"print({10**17})", f"print({10**17 + 1})") == [1.0, 0.0]


def test_functions_are_called(tmp_path):
    cases = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], 7]}
    row = {**ROW, "solutions": "def add(a, b): return a + b"}
    built = task(tmp_path, cases, row=row)
    assert rewards(built, "def add(a, b): return b + a", "def add(a, b): return 3") == [1.0, 0.0]
    listed = [{"input": "1\n2", "output": "3", "testtype": "functional", "fn_name": "add"}]
    built = task(tmp_path, listed, worked_field=None)
    method = "class Solution:\n    def add(self, a, b): return a {} b"
    assert rewards(built, method.format("+"), method.format("-")) == [1.0, 0.0]


def packed(content):
    return base64.b64encode(zlib.compress(pickle.dumps(content))).decode()


def test_rows_of_livecodebench_are_read_as_published(tmp_path):
    public = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
    private = [{"input": "2\n2", "output": "4", "testtype": "functional"}]
    row = {
        "question": "Add.",
        "public": json.dumps(public),
        "private": packed(json.dumps(private)),
        "metadata": json.dumps({"func_name": "add"}),
    }
    columns = {"tests_field": ["public", "private"], "worked_field": None}
    built = task(tmp_path, [], row=row, **columns)
    method = "class Solution:\n    def add(self, a, b): return {}"
    assert rewards(built, *map(method.format, ("a + b", "3", "4"))) == [1.0, 0.0, 0.0]
    for bad, why in ((packed(TypeError), "neither JSON nor"), (packed(3), "neither JSON nor")):
        with pytest.raises(UserError, match=f"row 1: field public, private .*{why}"):
            task(tmp_path, [], row={**row, "private": bad}, **columns)


@pytest.mark.parametrize(
    ("cases", "why"),
    [
        ({"inputs": ["1"], "outputs": []}, "as many of each"),
        ({"inputs": [], "outputs": []}, "no tests"),
        ({"inputs": ["1"], "outputs": [""]}, "its reference fails"),
    ],
)
def test_rows_that_cannot_judge_are_refused(tmp_path, cases, why):
    with pytest.raises(UserError, match=f"row 1: .*{why}"):
        task(tmp_path, cases)
