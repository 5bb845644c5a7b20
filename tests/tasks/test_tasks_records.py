"""Tasks over local files: real rows of the published sets, and every kind of bad file."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlcore.errors import UserError
from rlcore.tasks import make_task
from rlcore.tasks.row_tasks import Record, RecordTask

DATA = Path(__file__).parent.parent / "data"
GSM8K = {
    "train_path": str(DATA / "gsm8k_train.jsonl"),
    "heldout_path": str(DATA / "gsm8k_test.jsonl"),
}
MATH = {"train_path": str(DATA / "math_train.jsonl"), "heldout_path": str(DATA / "math_test.jsonl")}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(("name", "args"), [("gsm8k", GSM8K), ("math", MATH)])
def test_published_rows_load_and_only_their_own_answers_are_right(name, args):
    task = make_task(name, args)
    assert (task.size("train"), task.size("heldout")) == (40, 20)
    for split in ("train", "heldout"):
        items = [task.item(split, i) for i in range(task.size(split))]
        for item, other in zip(items, items[1:] + items[:1]):
            assert task.grade(item, task.worked_answer(item)).reward == 1.0, item
            if other.answer.removeprefix("x=") != item.answer.removeprefix("x="):
                assert task.grade(item, task.worked_answer(other)).reward == 0.0, (item, other)
    assert task.item("train", 41).question == task.item("train", 1).question
    assert task.item("train", 41).prompt_id == f"{name}/train/41"


def test_gsm8k_reads_numbers_as_people_write_them():
    task = make_task("gsm8k", {**GSM8K, "format_reward": 0.2})
    item = next(i for i in (task.item("train", n) for n in range(40)) if i.answer == "72")
    assert "<<" not in task.worked_answer(item)
    for response in (
        "#### 72",
        "It is $72.00.\n#### $72.00",
        "\\boxed{72}",
        "#### 7\n#### 72 clips",
    ):
        assert task.grade(item, response).reward == 1.0, response
    plain = task.grade(item, "first 48, then 24, so 72.")
    assert plain.reward == pytest.approx(0.8) and plain.parts == {"correct": 1.0, "format": 0.0}
    for response in (
        "",
        "#### ",
        "720",
        "72 or 73",
        "#### 72\n#### 7",
        "72e0000000000 x",
        "\\boxed{72x}",
    ):
        assert task.grade(item, response).parts["correct"] == 0.0, response


def test_gsm8k_thousands_separators(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "q", "answer": "a\n#### 1,234"}])
    task = make_task("gsm8k", {"train_path": path})
    assert task.grade(task.item("train", 0), "so $1,234.").reward == 1.0
    assert task.grade(task.item("train", 0), "so 1234").reward == 1.0
    assert task.grade(task.item("train", 0), "so 1,235").reward == 0.0


def test_math_judges_equivalence_not_spelling(tmp_path):
    answers = ["\\frac{1}{2}", "(3,\\frac{\\pi}{2})", "\\text{Evelyn}", "x^2-1", 0.5]
    path = write(tmp_path / "a.jsonl", [{"problem": "p", "answer": answer} for answer in answers])
    task = make_task("math", {"train_path": path})
    right = [
        [
            "\\boxed{0.5}",
            "so $\\boxed{\\dfrac12}$.",
            "\\boxed{3}, no: \\boxed{\\frac{2}{4}}",
            "the answer is $1/2$",
        ],
        ["\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}"],
        ["\\boxed{\\text{Evelyn}}"],
        ["\\boxed{(x-1)(x+1)}"],
        ["\\boxed{1/2}"],
    ]
    wrong = ["\\boxed{7}", "", "\\boxed{", "\\boxed{\\frac{1}{}", "no idea"]
    for index, responses in enumerate(right):
        item = task.item("train", index)
        for response in responses:
            assert task.grade(item, response).reward == 1.0, response
        for response in wrong:
            assert task.grade(item, response).reward == 0.0, response


def test_math_worked_answers_end_in_a_boxed_reference(tmp_path):
    solutions = ["It is \\boxed{4}.", "It is $\\framebox{4}$.", "Not \\boxed{3}, but four."]
    rows = [{"problem": "p", "answer": "4", "solution": solution} for solution in solutions]
    task = make_task(
        "math", {"train_path": write(tmp_path / "a.jsonl", rows), "worked_field": "solution"}
    )
    worked = [task.worked_answer(task.item("train", i)) for i in range(3)]
    assert worked == [solutions[0], solutions[1] + "\n\\boxed{4}", solutions[2] + "\n\\boxed{4}"]


def test_parquet_with_nested_fields_and_an_instruction(tmp_path):
    rows = [
        {"prompt": [{"content": f"{n}+1"}], "reward_model": {"truth": str(n + 1)}} for n in range(3)
    ]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    args = {
        "heldout_path": str(path),
        "question_field": "prompt.0.content",
        "answer_field": "reward_model.truth",
    }
    task = make_task("math", {**args, "instruction": "Think."})
    item = task.item("heldout", 2)
    assert (item.question, item.answer) == ("2+1\nThink.", "3")
    assert task.size("train") == 0
    with pytest.raises(UserError, match=r"task\.args\.train_path=None"):
        task.item("train", 0)


@pytest.mark.parametrize(
    ("content", "suffix", "said"),
    [
        (None, ".jsonl", "names no file"),
        (b"", ".jsonl", "is an empty data set"),
        (b"\n\n", ".jsonl", "is an empty data set"),
        (b"{}", ".xlsx", "give a .jsonl, .json, .csv, .parquet or .arrow file"),
        (
            b'{"question": "q", "answer": "#### 1"}\n\n{"question": "q"}\n',
            ".jsonl",
            "row 3: field answer is absent",
        ),
        (b'{"question": "q", "answer": null}\n', ".jsonl", "row 1: field answer is empty"),
        (
            b'{"question": "q", "answer": "72"}\n',
            ".jsonl",
            "row 1: field answer does not end in '#### <number>'",
        ),
        (b'{"question": " ", "answer": "#### 1"}\n', ".jsonl", "row 1: field question is empty"),
        (b'{"question": ["q"], "answer": "#### 1"}\n', ".jsonl", "row 1: field question.0 is str"),
        (b'{"question": "q", "answer": "#### 1"}\nnonsense\n', ".jsonl", "row 2 is not JSON"),
        (b"[1]\n", ".jsonl", "row 1 is not a JSON object"),
        (b"\xff\xfe", ".jsonl", "cannot be read"),
        (b"not arrow at all", ".arrow", "cannot be read as Arrow"),
        (b"not parquet at all", ".parquet", "cannot be read as Parquet"),
    ],
)
def test_bad_files_are_user_errors(tmp_path, content, suffix, said):
    path = tmp_path / f"a{suffix}"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        make_task("gsm8k", {"train_path": str(path)})
    assert str(error.value).startswith(f"task.args.train_path={path} ") and said in str(error.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
ROWS = st.one_of(
    st.dictionaries(st.sampled_from(["problem", "answer", "solution", "messages"]), JSON).map(
        lambda row: json.dumps(row).encode()
    ),
    st.sampled_from([b"[" * 100_000, b'{"problem": 1' + b"0" * 5000 + b"}", b'{"a": NaN}']),
    st.binary(max_size=20),
)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(ROWS, min_size=1, max_size=3))
def test_whatever_a_row_holds_it_is_taken_or_refused_in_a_sentence(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([*rows, b'{"problem": "1+1?", "answer": "2"}']) + b"\n")
    try:
        task = make_task("math", {"train_path": str(path)})
    except UserError as error:
        assert str(error).startswith(f"task.args.train_path={path} ")
    else:
        assert task.size("train") <= len(rows) + 1
        for index in range(task.size("train")):
            assert isinstance(task.item("train", index).question, str)


class OddRows(RecordTask):
    name = "odd"

    def record(self, row):
        return Record(str(10 // row["by"]), "a")

    def grade(self, item, response):
        raise NotImplementedError


def test_a_row_that_a_task_of_ones_own_cannot_read_is_refused_by_its_number(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"by": 5}, {"by": 0}])
    with pytest.raises(UserError, match="has a bad row: row 2: ZeroDivisionError: "):
        OddRows(train_path=path)


def test_no_file_at_all():
    with pytest.raises(UserError, match=r"task\.args\.train_path=None"):
        make_task("gsm8k", {})


def test_rows_without_an_answer_can_be_left_out_and_are_counted(tmp_path):
    path = write(
        tmp_path / "a.jsonl", [{"problem": "p", "answer": "1"}, {"problem": "p", "answer": None}]
    )
    with pytest.raises(UserError, match="missing_answer=skip"):
        make_task("math", {"train_path": path})
    task = make_task("math", {"train_path": path, "missing_answer": "skip"})
    assert task.size("train") == 1 and task.skipped == {"train": 1, "heldout": 0}


def test_a_file_task_runs_the_users_function(tmp_path):
    grader = tmp_path / "my_grader.py"
    grader.write_text(
        "def score(item, response):\n"
        "    length = len(response)\n"
        "    return float(item.meta['limit'] >= length), {'length': length}\n"
        "CONSTANT = 3\n"
    )
    path = write(
        tmp_path / "a.jsonl", [{"q": "say little", "limit": 3}, {"q": "say more", "limit": 9}]
    )
    args = {
        "train_path": path,
        "question_field": "q",
        "answer_field": None,
        "meta_fields": ["limit"],
    }
    task = make_task("file", {**args, "grader": f"{grader}:score"})
    grade = task.grade(task.item("train", 0), "four")
    assert (grade.reward, grade.parts) == (0.0, {"length": 4.0})
    assert task.grade(task.item("train", 1), "four").reward == 1.0
    for spec, said in [
        (f"{grader}:points", "choose one of: score, CONSTANT"),
        (f"{grader}:CONSTANT", "is not a function"),
        (f"{tmp_path}/none.py:score", "there is no file"),
        ("score", "package.module:name"),
    ]:
        with pytest.raises(UserError) as error:
            make_task("file", {**args, "grader": spec})
        assert str(error.value).startswith(f"task.args.grader={spec} ") and said in str(error.value)
