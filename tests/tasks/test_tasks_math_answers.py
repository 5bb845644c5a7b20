"""Mathematical answers: pairs of one meaning and of two, laws of the comparison, and bounds."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.graders.mathematics.math_answers import (
    boxes,
    equivalent,
    final_answer,
    last_boxed,
    read,
    spelled,
)
from rlcore.tasks import make_task
from rlcore.types import Item

DATA = Path(__file__).parent.parent / "data"


def rows(name):
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def published():
    found = [row["answer"] for split in ("train", "test") for row in rows(f"math_{split}.jsonl")]
    return sorted(set(map(str, found)))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text(json.dumps({"problem": "p", "question": "q", "answer": "#### 1"}) + "\n")
    return {name: make_task(name, {"train_path": str(path)}) for name in ("math", "gsm8k")}


def correct(task, reference, response):
    item = Item(f"{task.name}/train/0", "q", answer=reference)
    return task.grade(item, response).parts["correct"] == 1.0


def test_pairs_of_answers_are_judged_by_meaning(tasks):
    pairs = rows("math_answers.jsonl")
    assert len(pairs) > 500
    wrong = [
        p for p in pairs if correct(tasks["math"], p["reference"], p["response"]) != p["equal"]
    ]
    assert not wrong


def test_gsm8k_reads_the_same_boxes_and_its_own_marks(tasks):
    answers = rows("gsm8k_answers.jsonl")
    wrong = [
        p for p in answers if correct(tasks["gsm8k"], p["reference"], p["response"]) != p["correct"]
    ]
    assert not wrong


def test_published_references_equal_themselves_and_no_other():
    references = published()
    assert all(equivalent(reference, (reference,)) for reference in references)
    same = {
        (a, b)
        for a, b in itertools.permutations(references, 2)
        if equivalent(a, (b,)) and read(a).text != read(b).text
    }
    allowed = {frozenset(pair) for pair in same}
    assert all(_of_one_meaning(*pair) for pair in allowed), allowed


def _of_one_meaning(a, b):
    """Published references that differ in their unit, their variable or their fraction alone."""
    bare = [
        "".join(c for c in t.replace("dfrac", "frac").split("=")[-1] if c.isalnum() or c in "-/.")
        for t in (a, b)
    ]
    digits = ["".join(c for c in t if c.isdigit()) for t in bare]
    return digits[0] == digits[1]


@pytest.mark.parametrize(
    ("response", "content"),
    [
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed{\\left\\{1,2\\right.}", "\\left\\{1,2\\right."),
        ("\\boxed{4}, no, \\fbox{5}", "5"),
        ("\\framebox[3cm][c]{5}", "5"),
        ("\\boxed {5}", "5"),
        ("\\boxed 12", "12"),
        ("\\boxed{5}\\boxed{ }", "5"),
        ("$\\boxed{5$ and more", "5"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxedx{5}", None),
        ("\\boxed{}", None),
    ],
)
def test_the_last_box_that_holds_something_is_read(response, content):
    assert last_boxed(response) == content


def test_boxes_that_only_a_joint_separates_are_one_answer():
    assert final_answer("$\\boxed{1}$ and $x = \\boxed{-2}$").texts == ("1", "-2")
    assert final_answer("$\\boxed{1}$ is wrong, so $\\boxed{-2}$").texts == ("-2",)


PIECES = (
    "\\frac { } ( ) [ ] \\{ \\} 1 23 x y + - ^ _ , \\sqrt \\text{ cm \\boxed{ \\pi i ! | \\pm = < "
    "\\le \\cup \\infty \\% ^\\circ $ \\$ \\begin{pmatrix} \\end{pmatrix} & \\\\ and \\left "
    "\\right 0.5 \\sin e : \\overline{ \\in \\mid /"
)
LATEX = st.lists(st.sampled_from([*PIECES.split(), " "]), max_size=40).map("".join)
INTEGERS = st.integers(-(10**6), 10**6)
SMALL = st.integers(-20, 20)


@settings(deadline=None, max_examples=300)
@given(text=LATEX, other=LATEX)
def test_any_text_is_read_and_equals_itself(text, other):
    equivalent(text, final_answer(other).texts)
    boxes(text)
    if text.strip():
        assert equivalent(text, (text,))


@settings(deadline=None)
@given(text=LATEX, other=LATEX)
def test_comparison_of_what_is_no_equation_is_symmetric(text, other):
    one, two = read(text), read(other)
    if one.node is not None and two.node is not None and "=" not in text + other:
        assert equivalent(text, (other,)) == equivalent(other, (text,))


@settings(deadline=None)
@given(a=INTEGERS, b=INTEGERS)
def test_integers_are_equal_exactly_where_they_are_the_same(a, b):
    for form in (f"{b}", f"{b:,}", f"{b}.0", f"x={b}", f"{b} \\text{{ apples}}", f"\\${b}"):
        assert equivalent(str(a), (form,)) == (a == b), form


@settings(deadline=None)
@given(a=SMALL, b=SMALL.filter(bool), factor=SMALL.filter(bool))
def test_fractions_are_equal_to_their_multiples_and_to_no_neighbour(a, b, factor):
    reference = f"\\frac{{{a}}}{{{b}}}"
    assert equivalent(reference, (f"{a * factor}/({b * factor})",))
    assert not equivalent(reference, (f"\\frac{{{a + 1}}}{{{b}}}",))


@settings(deadline=None)
@given(a=SMALL, width=st.integers(1, 9), brackets=st.sampled_from(["()", "[]", "(]", "[)"]))
def test_intervals_are_equal_to_their_inequalities_both_ways_round(a, width, brackets):
    opened, closed = brackets
    b = a + width
    interval = f"{opened}{a},{b}{closed}"
    low = "\\le" if opened == "[" else "<"
    high = "\\le" if closed == "]" else "<"
    inequality = f"{a} {low} x {high} {b}"
    flipped = f"{b} {high.replace('<', '>').replace('le', 'ge')} x " + (
        f"{low.replace('<', '>').replace('le', 'ge')} {a}"
    )
    for form in (inequality, flipped, f"\\{{x : {inequality}\\}}"):
        assert equivalent(interval, (form,)) and equivalent(form, (interval,))
    other = f"{a} {'<' if opened == '[' else chr(92) + 'le'} x {high} {b}"
    assert not equivalent(interval, (other,)) and not equivalent(other, (interval,))


@settings(deadline=None)
@given(exponent=st.integers(1, 3000), other=st.integers(1, 3000))
def test_tiny_values_are_compared_by_their_size(exponent, other):
    assert equivalent(f"2^{{-{exponent}}}", (f"\\frac{{1}}{{2^{{{other}}}}}",)) == (
        exponent == other
    )
    assert not equivalent(f"10^{{-{exponent}}}", ("0",))


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9}}",
        "9^{9^{9^{9}}}",
        "9**9**9**9",
        "((9!)!)!",
        "\\frac{1}{10^{10^{10}}}",
        "1e999999999",
        "\\binom{100000}{50000}",
        "\\sin(10^{1000000})",
        "\\exp(\\exp(\\exp(9)))",
        "7" * 5000,
        "9" * 4000 + "!",
        "(" * 500 + "1" + ")" * 500,
        "{" * 3000,
        "\\sqrt" * 300 + "2",
        "-" * 3000 + "1",
        "x^" * 300 + "2",
        "\\text{" * 200 + "a" + "}" * 200,
        "1+" * 2000 + "1",
        "(x+1)^{100000}",
        "\\boxed{" * 1000,
        "0.\\overline{" + "3" * 5000 + "}",
        "\\{" + ",".join(f"\\pm {n}" for n in range(300)) + "\\}",
    ],
)
def test_what_is_too_large_to_compute_is_wrong_and_never_an_error(tasks, text):
    for reference in ("5", "x^2", "1,2"):
        assert not correct(tasks["math"], reference, f"\\boxed{{{text}}}")
        assert not correct(tasks["gsm8k"], "5", f"\\boxed{{{text}}}")
    assert equivalent(text, (text,))


def test_long_integers_are_compared_exactly():
    digits = "7" * 1000
    assert equivalent(digits, (f"{digits}.0",))
    assert not equivalent(digits, (digits[:-1] + "8",))


@pytest.mark.parametrize(
    ("one", "another", "alike"),
    [
        ("\\frac12", "0.5", True),
        ("1{,}000", "1000", True),
        ("(1, 2)", "(1,2)", True),
        ("x+1", "x+2", False),
        ("9^{9^{9}}", "9^{9^{8}}", False),
    ],
)
def test_votes_for_one_answer_have_one_spelling(one, another, alike):
    assert spelled((one,)) and (spelled((one,)) == spelled((another,))) == alike
