"""Data sets of several files, numbers of narrow columns, and questions with several answers."""

import json
from decimal import Decimal

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from rlcore.config.compose import load
from rlcore.tasks import make_task, remarks_of
from rlcore.tasks.arguments import ArgumentError
from rlcore.tasks.row_files import rows


def read(path, split=None):
    return list(rows("train_path", path if isinstance(path, list) else str(path), split))


def refusal(path, split=None):
    with pytest.raises(ArgumentError) as error:
        read(path, split)
    return error.value.sentence("task.args")


def parquet(file, *questions):
    file.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"question": list(questions), "answer": ["1"] * len(questions)})
    pyarrow.parquet.write_table(table, file)
    return str(file)


def shards(folder, split="train", count=3):
    for i in range(count):
        parquet(
            folder / f"{split}-{i:05d}-of-{count:05d}.parquet", f"{split}{2 * i}", f"{2 * i + 1}"
        )


def asked(found):
    return [row["question"] for _, row in found]


@pytest.mark.parametrize("form", ["folder", "pattern", "list"])
def test_shards_are_one_set_in_their_order_and_rows_are_counted_on(tmp_path, form):
    shards(tmp_path / "data")
    given = {
        "folder": tmp_path / "data",
        "pattern": tmp_path / "data" / "*.parquet",
        "list": [str(tmp_path / f"data/train-{i:05d}-of-00003.parquet") for i in range(3)],
    }[form]
    found = read(given)
    assert [number for number, _ in found] == [1, 2, 3, 4, 5, 6]
    assert asked(found) == ["train0", "1", "train2", "3", "train4", "5"]


def test_numbers_in_names_are_ordered_by_their_value(tmp_path):
    for i in (10, 9, 1):
        (tmp_path / f"part-{i}.jsonl").write_text(json.dumps({"question": str(i)}) + "\n")
    assert asked(read(tmp_path)) == asked(read(tmp_path / "part-*.jsonl")) == ["1", "9", "10"]


def test_a_folder_of_several_splits_has_one_named(tmp_path):
    shards(tmp_path / "data")
    parquet(tmp_path / "data" / "test-00000-of-00001.parquet", "held out")
    (tmp_path / "README.md").write_text("a card")
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.json").write_text("[]")
    said = refusal(tmp_path)
    assert "holds the splits" in said and "train_split=" in said
    assert len(read(tmp_path, "train")) == 6
    assert asked(read(tmp_path, "test")) == ["held out"]


def test_what_a_folder_or_a_pattern_cannot_mean_is_said(tmp_path):
    shards(tmp_path / "data")
    (tmp_path / "data" / "train-00001-of-00003.parquet").unlink()
    assert "lacks train-00001-of-00003: copy all files of the set" in refusal(tmp_path / "data")
    (tmp_path / "data" / "more.jsonl").write_text("{}")
    said = refusal(tmp_path / "data")
    assert "several formats (.jsonl, .parquet): name those that are meant by a pattern" in said
    assert len(read(f"{tmp_path}/data/*.jsonl")) == 1  # the remedy
    assert "matches no file" in refusal(tmp_path / "none-*.parquet")
    (tmp_path / "data" / "notes.txt").write_text("")
    assert "matches notes.txt, which is not a data file" in refusal(tmp_path / "data" / "n*")
    assert "lists no file" in refusal([])
    strange = tmp_path / "a[1].jsonl"
    strange.write_text('{"question": "of this name"}\n')
    assert asked(read(strange)) == ["of this name"]


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_files_of_other_columns_are_not_one_set(tmp_path, form):
    for name, columns in (("a", ["question", "answer"]), ("b", ["question"]), ("c", ["answer"])):
        if form == "csv":
            text = "\n".join([",".join(columns), ",".join("x" * len(columns))])
            (tmp_path / f"{name}.csv").write_text(text)
        else:
            table = pyarrow.table({column: ["x"] for column in columns})
            pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    said = f"a.{form} has answer and b.{form} has not"
    assert said in refusal(tmp_path) and said in refusal(tmp_path / f"*.{form}")
    assert said in refusal([tmp_path / f"{name}.{form}" for name in "ab"])
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text('{"a": 1}\n{"a": 2, "b": 3}\n')
    (tmp_path / "rows" / "b.jsonl").write_text('{"c": 1}\n')
    assert len(read(tmp_path / "rows")) == 3  # rows of JSON have no columns


def test_a_column_that_stands_twice_is_said(tmp_path):
    table = pyarrow.table([pyarrow.array([1.0]), pyarrow.array([2.0])], names=["a", "a"])
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    with pyarrow.ipc.new_stream(str(tmp_path / "x.arrow"), table.schema) as writer:
        writer.write_table(table)
    for name in ("x.parquet", "x.arrow"):
        assert f"{name} has the column a twice." in refusal(tmp_path / name)


def test_links_count_as_what_they_lead_to(tmp_path):
    for i in (0, 1):
        parquet(tmp_path / "blobs" / f"{i}.bin", f"q{i}")
        link = tmp_path / "snapshots" / "data" / f"train-{i}.parquet"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../../blobs/{i}.bin")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "data").symlink_to("../snapshots/data")
    (tmp_path / "set" / "data" / "self").symlink_to("..")
    for path in (tmp_path / "snapshots", tmp_path / "set", tmp_path / "set" / "**" / "*.parquet"):
        assert asked(read(path)) == ["q0", "q1"], path
    (tmp_path / "blobs" / "1.bin").unlink()
    for path in (tmp_path / "set", tmp_path / "snapshots" / "data" / "*.parquet"):
        assert "holds train-1.parquet, a link to a file that is not there" in refusal(path)


def test_hidden_files_are_not_of_a_set(tmp_path):
    parquet(tmp_path / ".train.parquet", "hidden")
    for path, said in ((tmp_path, "not a folder of data"), (tmp_path / "*", "matches no file")):
        assert said in refusal(path) and said in refusal(path, "train")
    parquet(tmp_path / "nested" / "deeper" / "train.parquet", "shown")
    assert asked(read(tmp_path)) == asked(read(tmp_path, "train")) == ["shown"]


def test_shards_are_words_of_the_command_line(tmp_path, monkeypatch):
    shards(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    base = ["run_dir=r", "task=math", "task.args.heldout_path=null", "evaluation.every=0"]
    base += ["evaluation.at_start=false"]
    files = [f"{tmp_path}/data/train-0000{i}-of-00003.parquet" for i in range(3)]
    for word, path in (
        ("task.args.train_path=data", f"{tmp_path}/data"),
        ("task.args.train_path='data/*.parquet'", f"{tmp_path}/data/*.parquet"),
        (f"task.args.train_path=[{','.join(files)}]", files),
    ):
        config = load([*base, word, "task.args.question_field=question"])
        assert config.task.args["train_path"] == path
        task = make_task("math", config.task.args)
        assert task.size("train") == 6 and task.item("train", 5).question.startswith("5")


NUMBERS = [0.1, -2.5, 3.0, 1e-7, 16777217.0, 65504.0, None]


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
@pytest.mark.parametrize("form", ["plain", "list", "struct", "dictionary"])
def test_numbers_are_the_shortest_decimals_of_their_columns_type(tmp_path, kind, form):
    narrow = {"float16": np.float16, "float32": np.float32, "float64": np.float64}[kind]
    values = [v if v is None else narrow(min(v, 65504.0)) for v in NUMBERS]
    made = pyarrow.array(values, getattr(pyarrow, kind)())
    wanted = [v if v is None else float(str(v)) for v in values]
    if form == "dictionary":
        if kind == "float16":
            pytest.skip("Arrow has no dictionaries of float16")
        made = made.dictionary_encode()
    elif form == "list":
        made = pyarrow.array([[v, v] for v in values], pyarrow.list_(made.type))
        wanted = [[v, v] for v in wanted]
    elif form == "struct":
        made = pyarrow.array([{"a": v} for v in values], pyarrow.struct([("a", made.type)]))
        wanted = [{"a": v} for v in wanted]
    pyarrow.parquet.write_table(pyarrow.table({"answer": made}), tmp_path / "a.parquet")
    assert [row["answer"] for _, row in read(tmp_path / "a.parquet")] == wanted


def test_decimals_are_text_with_all_of_their_digits(tmp_path):
    given = [Decimal("0.100"), None, Decimal("-12345678901234567.125"), Decimal("1E+2")]
    made = pyarrow.array(given, pyarrow.decimal128(30, 3))
    pyarrow.parquet.write_table(pyarrow.table({"answer": made}), tmp_path / "a.parquet")
    found = [row["answer"] for _, row in read(tmp_path / "a.parquet")]
    assert found == ["0.100", None, "-12345678901234567.125", "100.000"]


def test_the_decimal_of_any_float32_is_the_same_number_in_fewest_digits(tmp_path):
    values = np.random.default_rng(5).integers(0, 2**32, 3000, np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    table = pyarrow.table({"answer": pyarrow.array(values)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    read_values = [row["answer"] for _, row in read(tmp_path / "a.parquet")]
    assert len(values) > 2900 and (np.array(read_values, np.float32) == values).all()
    digits = [len(Decimal(repr(v)).normalize().as_tuple().digits) for v in read_values]
    assert max(digits) == 9  # a float64 needs 17
    for value, short, count in zip(values[:300], read_values, digits):
        assert count == 1 or np.float32(f"{short:.{count - 2}e}") != value  # none has fewer


@pytest.mark.parametrize(
    "kind, value, text",
    [
        ("float32", 0.1, "0.1"),
        ("float16", 0.1, "0.1"),
        ("float64", 1e23, "100000000000000000000000"),
        ("float32", -0.0, "0"),
        ("float64", 5.0, "5"),
    ],
)
def test_references_are_written_as_a_person_would(tmp_path, kind, value, text):
    array = pyarrow.array([value], getattr(pyarrow, kind)())
    table = pyarrow.table({"question": ["q"], "answer": array})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "g.py").write_text("def grade(item, response): return 0.0\n")
    args = {"grader": f"{tmp_path}/g.py:grade", "train_path": str(tmp_path / "a.parquet")}
    assert make_task("file", args).item("train", 0).answer == text


def test_questions_with_different_answers_are_a_note_with_their_rows(tmp_path):
    pairs = [("a", "1"), ("b", "2"), ("a", "1"), ("a", "3"), ("c", "4"), ("c", "5")]
    text = "".join(json.dumps({"problem": q, "answer": a}) + "\n" for q, a in pairs)
    (tmp_path / "rows.jsonl").write_text(text)
    (tmp_path / "held.jsonl").write_text(json.dumps({"problem": "b", "answer": "7"}) + "\n")
    train = {"train_path": str(tmp_path / "rows.jsonl")}
    held = {"heldout_path": str(tmp_path / "held.jsonl")}
    (said,) = remarks_of(make_task("math", {**train, **held}))
    assert said.startswith("3 questions stand in several rows with different answers: ")
    assert "train row 1 ('1'); train row 3 ('1'); train row 4 ('3')" in said
    assert "train row 2 ('2'); heldout row 1 ('7')" in said
    assert remarks_of(make_task("math", held)) == []
