"""Scorers of other packages, with the faults that reasoning-gym's have: nothing is executed, wrong
answers have no reward, right ones have it. The package itself: test_scorers.py, nightly."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import reasoning_gym_like

from rlcore.errors import UserError
from rlcore.tasks import make_task
from rlcore.tasks.foreign import alike, is_like, number, tried
from rlcore.tasks.grades import Grade
from rlcore.tasks.isolation import IsolatedGrader, IsolatedVerdict, IsolationError
from rlcore.types import Item

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    reasoning_gym_like.write(folder)
    return folder


@pytest.fixture
def make(package, monkeypatch):
    monkeypatch.syspath_prepend(str(package))

    def make(name, **further):
        args = {"name": name, "proof_cache": str(package / "proofs"), **further}
        return make_task("reasoning_gym", args)

    return make


def rewards(task, *answers, index=0):
    item = task.item("train", index)
    return [task.grade(item, f"<answer>{answer}</answer>").reward for answer in answers]


def test_nothing_of_an_answer_is_executed_and_the_reference_cannot_be_read(make, tmp_path):
    written = tmp_path / "written"
    answers = [
        f"open({str(written)!r}, 'w')",
        f"[open({str(written)!r}, 'w').write('1')]",
        f"__import__('os').system('touch {written}')",
        "eval(entry['answer'])",
        "entry['answer']",
        "[i for i in eval(entry['answer'])]",
        "__import__('sys')._getframe(1).f_locals['entry']['answer']",
        "(lambda: [1, 2])()",
        "[].__class__.__base__.__subclasses__()",
        "exit()",
        "9**9**9",
        "'1' * 10**12",
    ]
    task = make("queens")
    assert rewards(task, *answers) == [0.0] * len(answers)
    assert not written.exists()
    # what an honest list is worth stays
    assert rewards(task, "[1, 2]", "[1,2]", "(1, 2)", "[2, 1]") == [1.0, 0.5, 0.5, 0.0]


def test_a_replaced_grader_changes_no_later_score(make):
    task = make("queens")
    replace = "setattr(__import__('rlcore.tasks.reasoning_gym').tasks.reasoning_gym.ReasoningGym"
    assert rewards(task, f"{replace}, 'grade', lambda *_: 1)", "[7, 7]") == [0.0, 0.0]


def test_an_answer_that_does_not_end_is_wrong_and_a_starved_machine_fails_the_score(
    make, monkeypatch
):
    """Processor time decides: an answer that has used its limit is wrong however busy the machine
    is, and only one that was given no processor is not judged."""
    task = make("countdown")
    item = task.item("train", 0)
    for answer in ("factorial(factorial(20))", "9**9**9", "factorial(10**8)"):
        grade = task.grade(item, f"<answer>{answer}</answer>")
        assert (grade.reward, grade.parts["correct"], grade.parts["stopped"]) == (0.0, 0.0, 1.0)
    late = {"status": "late", "why": "it had no CPU"}
    monkeypatch.setattr(IsolatedGrader, "_ask", lambda *_: dict(late))
    with pytest.raises(IsolationError, match="too busy to judge an answer: it had no CPU"):
        task.grade(item, "<answer>factorial(factorial(21))</answer>")


def test_sympy_evaluates_arithmetic_and_nothing_else(make):
    pytest.importorskip("sympy")
    task = make("countdown")
    assert rewards(task, "3*4", "sqrt(144)", "2 + 10") == [1.0, 1.0, 1.0]
    wrong = rewards(task, "9**9**9", "integrate(12)", "S('12')", "open('x', 'w')", "nan", "{}")
    assert max(wrong) < 0.1 and wrong[0] == 0.0


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("complex", ["1.0 + 2.0i", "1+2i"], ["nan", "nan+nanj", "nani", "-nan", "1e999"]),
        ("halting", ["True", " True "], ["banana", "False", "{}", "nan", "0"]),
        ("factors", ["2 x 3", "3 x 2"], ["two times three", "nan", "{}", "", "6"]),
        ("empty", ["[1, 2]"], ["", "{}", "banana", "nan"]),
        ("prefix", ["0.3125"], ["0", "nan", "1", "-0"]),
        ("boxes", ['{"moves": [1, 2, 3]}'], ["5", "null", "[]", "banana", "1e999"]),
    ],
)
def test_silent_wrong_rewards_come_out_right(make, name, right, wrong):
    task = make(name)
    assert rewards(task, *right) == [1.0] * len(right)
    found = [task.grade(task.item("train", 0), f"<answer>{text}</answer>") for text in wrong]
    assert [grade.parts["correct"] for grade in found] == [0.0] * len(wrong)
    assert max(grade.reward for grade in found) < 1.0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("deaf", "its own reference has 0"),
        ("numbers", "it gives full credit to other problems' answers"),
    ],
)
def test_a_scorer_that_proves_nothing_is_refused_and_the_remedy_works(make, name, why):
    words = rf"task.args.name={name} .*not proven: {why}\. "
    with pytest.raises(UserError, match=words) as refusal:
        make(name)
    (remedy,) = re.findall(r"task\.args\.(\w+)=(\w+) compares", str(refusal.value))
    task = make(name, **dict([remedy]))
    item = task.item("train", 0)
    assert rewards(task, item.answer, "banana", "nan", "", "7") == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_exact_answers_need_references(make):
    with pytest.raises(UserError, match="scorer=exact needs references, which boxes does not have"):
        make("boxes", scorer="exact")


def test_problems_are_equal_in_every_process_where_a_package_draws_from_sets(make, package):
    program = (
        "import sys; from rlcore.tasks import make_task; "
        "task = make_task('reasoning_gym', "
        f"{{'name': 'unordered', 'proof_cache': {str(package)!r}}}); "
        "print(task.item('train', 3).question)"
    )
    ways = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    question = make("unordered").item("train", 3).question
    assert ways[0] == ways[1] == question + "\n"
    assert question.count("<answer>") == 1


def test_remarks_say_what_was_found(make):
    lines = make("complex").remarks()
    assert "it gives full credit to nan: such answers are counted as wrong" in lines
    assert make("factors").remarks()[-1] == (
        "it raises on wrong answers: such answers are counted as wrong"
    )
    assert "the problems have no reference answers: only wrong answers were tried" in (
        make("boxes").remarks()
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [("1/2", 0.5), ("-15.0 + 3.0i", -15 + 3j), ("i", 1j), ("1,000", 1000), ("2.5.", 2.5)],
)
def test_numbers_are_read_in_their_usual_forms(text, value):
    assert number(text) == value


def test_what_is_no_number_is_not_compared():
    assert number("banana") is None and number("1 2 x") is None
    assert alike("banana", "3") and alike("3", "banana")
    assert not alike("nan", "3") and not alike("0", "0.3125") and alike("0.333", "1/3")


def test_kinds_of_answers_that_say_nothing():
    assert is_like("-Infinity", "nan") and is_like("1e999", "nan") and is_like("NaN + 1", "nan")
    assert not is_like("12", "nan") and not is_like("1e9", "nan")
    assert is_like("[ ]", "{}") and not is_like("[1]", "{}") and is_like("[1]", "banana")


class Crowded:
    """A grader whose answers are stopped `late` times before they are judged."""

    def __init__(self, late):
        self.late = late

    def grade(self, prompt_id, text):
        if text != "7":
            return IsolatedVerdict("ok", Grade(0.0))
        self.late -= 1
        return IsolatedVerdict("ok", Grade(1.0)) if self.late < 0 else IsolatedVerdict("stopped")


@pytest.mark.parametrize(("late", "refused"), [(0, False), (2, False), (3, True)])
def test_a_crowded_moment_refuses_no_scorer(late, refused):
    item = Item("p/0", "a question", "7")
    assert bool(tried([item], Crowded(late)).refused) == refused
