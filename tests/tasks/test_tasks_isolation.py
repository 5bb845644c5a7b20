"""`task.args.isolate`: a user's grader in processes of its own, and attempts to leave them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import textwrap

import psutil
import pytest
from timing import wait_for_end

from rlcore.errors import UserError
from rlcore.graders.sandbox import available
from rlcore.tasks import make_task
from rlcore.tasks.isolation import AnswerLimits, IsolatedGrader
from rlcore.tasks.isolation.own import GraderError, advice, named

pytestmark = pytest.mark.processes

EVALS = """
    import math
    SECRET = 5

    def grade(item, response):
        reference = item.answer
        if response == "raise":
            raise ValueError("cannot judge")
        try:
            value = eval(response)
        except Exception:
            value = None
        return float(value == int(reference)), {"read": float(SECRET == 5)}
"""
# a grader that runs what the model wrote, as some do
RUNS = """
    def grade(item, response):
        names = {}
        exec(response, names)
        return float(names.get("answer") == int(item.answer))
"""


@pytest.fixture
def make(tmp_path):
    def make(source, answers=("5", "7"), worked=(), **args):
        grader = tmp_path / "graders.py"
        grader.write_text(textwrap.dedent(source))
        rows = [
            {"question": f"q{i}", "answer": answer, **({"worked": worked[i]} if worked else {})}
            for i, answer in enumerate(answers)
        ]
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        further = {"worked_field": "worked"} if worked else {}
        given = {"grader": f"{grader}:grade", "train_path": str(data), **further, **args}
        return make_task("file", given)

    return make


def graded(task, *responses):
    item = task.item("train", 0)
    return [task.grade(item, response) for response in responses]


def test_answers_are_evaluated_as_arithmetic_and_nothing_else(make, tmp_path):
    task = make(EVALS, isolate=True)
    right = graded(task, "5", "2 + 3", "abs(-5)", "max(1, 5)")
    assert [g.reward for g in right] == [1.0] * 4 and right[0].parts == {"read": 1.0}
    written = tmp_path / "written"
    attempts = [
        "int(reference)",
        "int(item.answer)",
        "SECRET",
        "SECRET + 0 * abs(0)",
        f"open({str(written)!r}, 'w').write('x')",
        "__import__('sys')._getframe(1).f_locals['item'].answer",
        "[e for e in (5,)][0]",
        "(lambda: 5)()",
        "(x := 5)",
        "exit(0)",
        "globals().update(grade=lambda *_: 1)",
        "__import__('os').kill(__import__('os').getppid(), 9)",
        "__import__('os').write(3, b'{}')",
    ]
    assert [g.reward for g in graded(task, *attempts)] == [0.0] * len(attempts)
    assert not written.exists()
    assert graded(task, "5")[0].reward == 1.0  # and the server is still there


def test_limits_make_an_answer_wrong_and_an_exception_fails_it(make):
    task = make(EVALS, isolate=True)
    endless, large = graded(task, "9**9**9", "'1' * 10**12")
    assert (endless.reward, endless.parts) == (0.0, {"correct": 0.0, "stopped": 1.0})
    assert large.reward == 0.0
    with pytest.raises(GraderError, match="ValueError: cannot judge"):
        graded(task, "raise")


def test_programs_stay_in_their_process(make, tmp_path):
    task = make(RUNS, worked=("answer = 5", "answer = 7"), isolate="programs")
    written = tmp_path / "written"
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        attempts = [
            f"open({str(written)!r}, 'w')",
            f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
            "import os; os.fork()",
            "import os; os.kill(os.getppid(), 9)",
            "import subprocess; subprocess.run(['true'])",
            "print(open('/proc/1/environ').read())",
            f"print(open({str(tmp_path / 'rows.jsonl')!r}).read())",
            "import os\nfor fd in range(3, 4096):\n os.fstat(fd) if fd != 3 else 0",
        ]
        for attempt in attempts:
            with pytest.raises(GraderError, match=r"Error"):
                graded(task, attempt)
    ends = [
        "import os; os._exit(0)",
        "import os; os.write(3, b'[1]'); os._exit(0)",
        "import signal; signal.signal(signal.SIGPROF, signal.SIG_IGN)\nwhile True: pass",
        "import time; time.sleep(10**6)",
        "print('x' * 10**6); answer = 6",
        "import sys; sys.modules.clear(); answer = 6",
    ]
    for end in ends:
        with contextlib.suppress(GraderError):  # its own error, which is no reward
            assert graded(task, end)[0].reward == 0.0
    assert graded(task, "answer = 5")[0].reward == 1.0
    assert not written.exists()


def test_graders_that_isolation_keeps_from_judging_are_refused(make):
    with pytest.raises(UserError, match="known answer of file/train/0: executes text") as refusal:
        make(RUNS, worked=("answer = 5", "answer = 7"), isolate=True)
    (remedy,) = re.findall(r"isolate=(\w+) lets", str(refusal.value))
    task = make(RUNS, worked=("answer = 5", "answer = 7"), isolate=remedy)
    assert graded(task, "answer = 5")[0].reward == 1.0
    starts = """
        import subprocess
        def grade(item, response):
            return float(subprocess.run(["true"]).returncode == 0)
    """
    with pytest.raises(UserError, match=r"task.args.isolate=True keeps .*subprocess.Popen\.$"):
        make(starts, isolate=True)
    with pytest.raises(UserError, match="isolate=yes is not accepted: give true, false or prog"):
        make(EVALS, isolate="yes")


def test_secrets_of_the_environment_do_not_reach_a_grader(make, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "hidden")
    monkeypatch.setenv("OF_USE", "seen")
    reads = """
        import os
        def grade(item, response):
            return float(os.environ.get(response) is not None)
    """
    task = make(reads, isolate=True)
    assert [g.reward for g in graded(task, "JUDGE_KEY", "OF_USE")] == [0.0, 1.0]


def test_a_server_that_was_killed_is_replaced_and_ends_with_its_owner():
    limits = AnswerLimits(layers=available())
    grader = IsolatedGrader("digits", {}, "digits", limits)
    item = make_task("digits", {}).item("train", 0)
    assert grader.grade(item.prompt_id, item.answer).grade.reward == 1.0
    first = grader.pid
    os.kill(first, signal.SIGKILL)
    assert grader.grade(item.prompt_id, item.answer).grade.reward == 1.0
    second = grader.pid
    assert second != first
    pid = os.fork()  # a fork asks the same server
    if not pid:
        os._exit(int(grader.grade(item.prompt_id, item.answer).grade.reward))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1 and grader.pid == second
    server = psutil.Process(second)
    grader.close()
    wait_for_end([server], 10)


def test_tokens_and_rewards_of_tokens_pass(make):
    tokens = """
        def grade(item, response, tokens):
            return [float(t == "a") for t in tokens], {"n": float(len(tokens))}
    """
    task = make(tokens, isolate=True)
    grade = task.grade(task.item("train", 0), "ab", tokens=["a", "b"])
    assert grade.token_rewards == (1.0, 0.0) and grade.parts == {"n": 2.0}


def test_advice_names_what_may_execute_an_answer(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(textwrap.dedent(EVALS))
    (tmp_path / "safe.py").write_text("def grade(item, response):\n    return 1.0\n")
    names = [f"{tmp_path / 'own.py'}:grade", f"{tmp_path / 'safe.py'}:grade"]
    (line,) = advice("file", {"grader": names})
    assert line.startswith(f"{names[0]} names eval, which may") and "isolate=true" in line
    assert advice("file", {"grader": names, "isolate": True}) == []
    task = tmp_path / "task.py"
    task.write_text(
        "class Task:\n    def grade(self, item, response):\n        return eval(response)\n"
    )
    (line,) = advice(f"{task}:Task", {})
    assert line.startswith(f"{task}:Task names eval")
    (tmp_path / "uses.py").write_text("from own import grade\n")
    names = [f"{tmp_path / 'uses.py'}:grade"]
    monkeypatch.syspath_prepend(str(tmp_path))
    (line,) = advice("file", {"grader": names})
    assert line.startswith(f"{names[0]} names eval")
    assert advice("json:loads", {}) == [] == advice("math:sqrt", {})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("from sympy.parsing.sympy_parser import parse_expr", {"parse_expr", "sympy"}),
        ("import ast\nast.literal_eval(x)", {"literal_eval"}),
        ("import pickle as p", {"pickle"}),
        ("import subprocess", {"subprocess"}),
        ("sympy.sympify(x)", {"sympify", "sympy"}),
        ("from sympy import S", {"sympy"}),
        ("import builtins\nbuiltins.eval(x)", {"eval"}),
        ("import pandas as pd\npd.eval(x)", {"eval"}),
        ("import os\nos.system(x)", {"system"}),
        ("import runpy", {"runpy"}),
        ("import importlib\nimportlib.import_module(x)", {"import_module"}),
        ("model.eval(); cursor.exec(1)", set()),
        ("exec(x)", {"exec"}),
        ("not python", set()),
    ],
)
def test_names_that_are_looked_for(source, words):
    from rlcore.tasks.isolation.own import DANGEROUS

    assert named(source) & DANGEROUS == words


# 0.8 s of CPU time, as of a package that a grader imports where it needs it; then what it is told
IMPORTS = """
    import sys
    import time

    def grade(item, response):
        if "colorsys" not in sys.modules:
            while time.process_time() < 0.8:
                pass
            import colorsys
        while response == "for ever":
            pass
        return float(response == item.answer)
"""


def test_a_grader_may_import_for_longer_than_an_answer_may_take(make, monkeypatch):
    monkeypatch.setattr("rlcore.tasks.isolation.own.TIMEOUT_S", 0.5)
    task = make(IMPORTS, isolate=True)
    assert [grade.reward for grade in graded(task, "5", "7")] == [1.0, 0.0]


def test_the_first_answer_of_a_server_has_an_answers_time_and_no_more(make, tmp_path):
    make(IMPORTS)
    args = {"grader": f"{tmp_path}/graders.py:grade", "train_path": f"{tmp_path}/rows.jsonl"}
    limits = AnswerLimits(timeout_s=0.5, layers=available())
    with contextlib.closing(IsolatedGrader("file", args, "file", limits)) as grader:
        assert grader.grade("file/train/0", "for ever").why == "time limit of 0.5 s"
        assert grader.grade("file/train/0", "5").grade.reward == 1.0
