"""Rows of data files, of saved and of cached data sets, and values that have no meaning."""

import csv
import gzip
import io
import json

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from rlcore.config.compose import load
from rlcore.errors import UserError
from rlcore.tasks import make_task
from rlcore.tasks.arguments import ArgumentError
from rlcore.tasks.math import Math
from rlcore.tasks.row_files import rows
from rlcore.tasks.row_tasks import Record

ROWS = [{"question": f"{n}?", "turns": [{"role": "user", "content": str(n)}]} for n in range(6)]


def arrow(path, content, new=pyarrow.ipc.new_stream):
    table = pyarrow.Table.from_pylist(content)
    with pyarrow.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def saved(folder, parts):
    """What `Dataset.save_to_disk(folder)` leaves."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(parts):05d}.arrow" for i in range(len(parts))]
    for name, part in zip(names, parts):
        arrow(folder / name, part)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return str(folder)


def read(path):
    return list(rows("train_path", str(path)))


def refusal(path):
    with pytest.raises(ArgumentError) as error:
        read(path)
    return error.value.sentence("task.args")


@pytest.mark.parametrize("new", [pyarrow.ipc.new_stream, pyarrow.ipc.new_file])
def test_both_formats_of_an_arrow_file_are_read(tmp_path, new):
    arrow(tmp_path / "rows.arrow", ROWS, new)
    assert read(tmp_path / "rows.arrow") == list(enumerate(ROWS, 1))


def test_a_saved_data_set_is_read_in_the_order_of_its_state(tmp_path):
    folder = saved(tmp_path / "set", [ROWS[4:], ROWS[:4]])
    assert read(folder) == list(enumerate(ROWS[4:] + ROWS[:4], 1))


def test_several_splits_are_listed_and_one_is_named(tmp_path):
    train = saved(tmp_path / "set" / "train", [ROWS])
    saved(tmp_path / "set" / "test", [ROWS[:1]])
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    said = refusal(tmp_path / "set")
    assert said.startswith(f"task.args.train_path={tmp_path}/set holds the splits test, train")
    assert len(read(train)) == 6


def test_folders_that_cannot_be_read_say_what_they_have(tmp_path):
    assert "it has: nothing" in refusal(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    assert "has no state.json (it has: notes.txt)" in refusal(tmp_path)
    folder = saved(tmp_path / "set", [ROWS])
    (tmp_path / "set" / "data-00000-of-00001.arrow").unlink()
    assert "data-00000-of-00001.arrow cannot be read as Arrow" in refusal(folder)
    (tmp_path / "set" / "state.json").write_text('{"_data_files": 3}')
    assert "has a state.json that cannot be read" in refusal(folder)


QUESTION = '{"question": "2+2?", "answer": '
MATH_ARGS = {"question_field": "question"}


def made(path, text, name="math", **args):
    path.write_text(text, encoding="utf-8")
    return make_task(
        name, {"train_path": str(path), **(MATH_ARGS if name == "math" else {}), **args}
    )


def row_refusal(path, text, name="math", **args):
    with pytest.raises(UserError) as error:
        made(path, text, name, **args)
    said = str(error.value)
    assert said.startswith(f"task.args.train_path={path} has a bad row: row 2")
    assert "\n" not in said and said.endswith(".") and "Traceback" not in said
    return said


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("NaN}", "row 2: field answer is NaN; task.args.missing_answer=skip"),
        ("-Infinity}", "row 2: field answer is -Infinity."),
        ("1e999}", "row 2: field answer is an infinite number."),
        ('"4", "answer": "5"}', "row 2: field answer stands in the row twice."),
        ('"\\ud83d"}', "row 2: field answer has a lone surrogate (U+D83D, character 1)"),
        (f"{'9' * 5000}}}", "row 2: field answer is an integer of 5,000 characters"),
        ("true}", "row 2: field answer is bool, not text or a number."),
        ("[]}", "row 2: field answer is an empty list; task.args.missing_answer=skip"),
        ('["4", NaN]}', "row 2: field answer.1 is NaN"),
        (f"{'[' * 300}{']' * 300}}}", "row 2: field answer is nested more than 100 levels"),
        (f"{'[' * 90000}{']' * 90000}}}", "row 2 is nested too deeply to be read (field answer)"),
    ],
)
def test_values_that_nobody_means_are_refused_by_row_and_field(tmp_path, answer, said):
    text = f'{QUESTION}"4"}}\n{QUESTION}{answer}\n'
    assert said in row_refusal(tmp_path / "rows.jsonl", text)


def test_values_that_no_task_reads_refuse_nothing(tmp_path):
    further = f'"4", "score": NaN, "id": {"7" * 5000}, "note": "\\ud83d", "n": 1, "n": 2'
    task = made(tmp_path / "rows.jsonl", f"{QUESTION}{further}}}\n")
    assert task.item("train", 0).answer == "4"


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ('"2\\udcff+2?"', "field question has a lone surrogate (U+DCFF, character 2)"),
        ('[{"role": "user", "content": "\\ud83d"}]', "field question.0.content has a lone"),
        ('[{"role": "user", "content": "a", "n": NaN}]', "field question.0.n is NaN"),
        (
            '[{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>"}]',
            "ends with an assistant turn that is begun and not finished (it ends with <think>)",
        ),
    ],
)
def test_questions_that_no_tokenizer_can_encode_are_refused(tmp_path, question, said):
    text = f'{QUESTION}"4"}}\n{{"question": {question}, "answer": "4"}}\n'
    assert "row 2: field question" in (shown := row_refusal(tmp_path / "rows.jsonl", text))
    assert said in shown


def test_what_a_task_of_ones_own_cannot_read_is_refused_by_row(tmp_path):
    class Own(Math):
        def record(self, row):
            return Record(row["question"], str(int(row["answer"])))

    path = tmp_path / "rows.jsonl"
    path.write_text(f'{QUESTION}"4"}}\n{QUESTION}"four"}}\n')
    with pytest.raises(ArgumentError, match="row 2: ValueError: invalid literal for int"):
        Own(train_path=str(path))


def test_bytes_that_are_no_text_name_their_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(f'{QUESTION}"4"}}\n'.encode() + b'{"question": "\xff"}\n')
    with pytest.raises(UserError, match="cannot be read as UTF-8: byte 15 in row 2 is not text"):
        make_task("math", {"train_path": str(path), **MATH_ARGS})


@pytest.mark.parametrize("end", [".json", ".json.gz", ".jsonl", ".jsonl.gz", ".csv", ".csv.gz"])
def test_every_form_of_text_file_gives_the_same_rows(tmp_path, end):
    content = [{"question": f'"{n}",\nthen \u2028?', "answer": str(n)} for n in range(3)]
    if end.startswith(".csv"):
        text = io.StringIO()
        writer = csv.DictWriter(text, ["question", "answer"])
        writer.writeheader()
        writer.writerows(content)
        data = text.getvalue()
    elif end.startswith(".jsonl"):
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
    else:
        data = json.dumps(content, indent=1)
    path = tmp_path / f"rows{end}"
    data = ("\ufeff" + data).encode()  # as spreadsheets save it
    path.write_bytes(gzip.compress(data) if end.endswith(".gz") else data)
    assert read(path) == list(enumerate(content, 1))


def test_a_json_file_may_hold_its_rows_under_one_key_or_a_line_each(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"version": 1, "data": ROWS}))
    assert [row for _, row in read(path)] == ROWS
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert [row for _, row in read(path)] == ROWS
    path.write_text(json.dumps({"a": ROWS, "b": ROWS}))
    assert "not a list of rows, nor an object with one such list (it has: a, b)" in refusal(path)
    path.write_text('[{"a": 1}, 2]')
    assert "row 2 is not a JSON object" in refusal(path)
    path.write_text('[\n{"a": 1},\nx]')
    assert "is not JSON (Expecting value, line 3)" in refusal(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n3\n", "row 2 has 1 fields, and there are 2 columns"),
        ("a,a\n1,2\n", "has the column a twice"),
        ('a,b\n1,2\n"3,4\n', "row 2 is not CSV"),
    ],
)
def test_bad_csv_names_its_row(tmp_path, text, said):
    (tmp_path / "rows.csv").write_text(text)
    assert said in refusal(tmp_path / "rows.csv")


def test_a_damaged_archive_is_a_refusal(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"question": 1}\n' * 999)[:-20])
    assert "cannot be read" in refusal(path)
    path.write_bytes(b"plain")
    assert "cannot be read" in refusal(path)


def test_a_named_split_of_a_saved_data_set_is_read(tmp_path):
    saved(tmp_path / "set" / "train", [ROWS])
    saved(tmp_path / "set" / "test", [ROWS[:1]])
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    both = {"train_path": str(tmp_path / "set"), "heldout_path": str(tmp_path / "set")}
    names = {"train_split": "train", "heldout_split": "test", "answer_field": "turns.0.content"}
    task = make_task("math", {**both, **names, **MATH_ARGS})
    assert (task.size("train"), task.size("heldout")) == (6, 1)
    with pytest.raises(UserError, match="none is called dev: name one of them with train_split=te"):
        make_task("math", {**both, **names, **MATH_ARGS, "train_split": "dev"})


def test_sets_in_the_local_cache_are_read_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("HF_DATASETS_CACHE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    assert "is not in the local cache" in refusal("hf:openai/gsm8k")
    hub = tmp_path / "hub" / "datasets--openai--gsm8k"
    for configuration in ("main", "socratic"):
        folder = hub / "snapshots" / "abc" / configuration
        folder.mkdir(parents=True)
        for split, content in (("train", ROWS), ("test", ROWS[:2])):
            file = folder / f"{split}-00000-of-00001.parquet"
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), file)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("abc")
    assert list(rows("train_path", "hf:openai/gsm8k/main", "train")) == list(enumerate(ROWS, 1))
    assert "holds the splits test, train: name one of" in refusal("hf:openai/gsm8k/main")
    with pytest.raises(ArgumentError, match=r"several configurations .*\(main, socratic\)"):
        list(rows("train_path", "hf:openai/gsm8k", "train"))
    prepared = tmp_path / "datasets" / "openai___gsm8k" / "main" / "0.0.0" / "f00"
    prepared.mkdir(parents=True)
    for part, content in enumerate((ROWS[:4], ROWS[4:])):
        arrow(prepared / f"gsm8k-train-0000{part}-of-00002.arrow", content)
    (prepared / "dataset_info.json").write_text("{}")
    assert list(rows("train_path", "hf:openai/gsm8k")) == list(enumerate(ROWS, 1))


def test_names_of_the_hub_are_those_of_the_local_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name in ("HF_DATASETS_CACHE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    words = ["run_dir=r", "task=gsm8k", "model=path", "model.path=Qwen/Qwen3-0.6B"]
    words += ["task.args.train_path=openai/gsm8k/main"]

    def paths():
        config = load(words)
        return config.model.path, config.task.args["train_path"]

    def cached(kind, name):
        folder = tmp_path / "home" / "hub" / f"{kind}--{name}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("abc")
        (folder / "snapshots" / "abc").mkdir(parents=True)
        return str(folder / "snapshots" / "abc")

    assert paths() == (str(tmp_path / "Qwen/Qwen3-0.6B"), str(tmp_path / "openai/gsm8k/main"))
    model = cached("models", "Qwen--Qwen3-0.6B")
    cached("datasets", "openai--gsm8k")
    assert paths() == (model, "hf:openai/gsm8k/main")
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)  # a folder comes first
    assert paths()[0] == str(tmp_path / "Qwen/Qwen3-0.6B")


def test_the_name_of_a_cached_set_is_no_path(tmp_path):
    words = [
        "task=gsm8k",
        "task.args.train_path=hf:openai/gsm8k/main",
        "model=path",
        "model.path=m",
    ]
    assert load(["run_dir=r", *words]).task.args["train_path"] == "hf:openai/gsm8k/main"


@pytest.mark.parametrize(
    ("name", "answers", "right"),
    [("math", ["\\frac12", "2"], ["0.5", "2"]), ("gsm8k", ["a #### 4", "b #### 6"], ["4", "6"])],
)
def test_each_of_several_accepted_answers_is_right(tmp_path, name, answers, right):
    text = json.dumps({"question": "?", "answer": answers}) + "\n"
    task = made(tmp_path / "rows.jsonl", text, name)
    item = task.item("train", 0)
    assert len(item.meta["answers"]) == 2
    assert [task.grade(item, f"\\boxed{{{r}}}").reward for r in right] == [1.0, 1.0]
    assert task.grade(item, "\\boxed{7}").reward == 0.0
    assert task.grade(item, task.worked_answer(item)).reward == 1.0


def graded(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def grade(item, response):\n"
        "    return float(response in item.meta.get('answers', [item.answer]))\n"
    )
    return f"{tmp_path}/mine.py:grade"


def test_a_grader_of_ones_own_sees_all_accepted_answers(tmp_path):
    text = json.dumps({"question": "?", "answer": [4, "four"]}) + "\n"
    task = made(tmp_path / "rows.jsonl", text, "file", grader=graded(tmp_path))
    item = task.item("train", 0)
    assert (item.answer, item.meta["answers"]) == ("4", ["4", "four"])
    assert [task.grade(item, r).reward for r in ("4", "four", "5")] == [1.0, 1.0, 0.0]


def test_one_null_in_a_meta_column_is_given_to_the_grader_as_it_is(tmp_path):
    content = [{"question": "?", "answer": "4", "level": level} for level in (3, None, "")]
    path, own = tmp_path / "rows.jsonl", {"grader": graded(tmp_path), "meta_fields": ["level"]}
    task = made(path, "".join(json.dumps(row) + "\n" for row in content), "file", **own)
    assert [task.item("train", i).meta["level"] for i in range(3)] == [3, None, ""]
    text = json.dumps(content[0]) + "\n" + '{"question": "?", "answer": "4"}\n'
    assert "row 2: field level is absent" in row_refusal(path, text, "file", **own)
    text = json.dumps(content[0]) + "\n" + '{"question": "?", "answer": "4", "level": NaN}\n'
    assert "row 2: field level is NaN" in row_refusal(path, text, "file", **own)
