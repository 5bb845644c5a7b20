"""Columns that hold conversations."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from rlcore.errors import UserError
from rlcore.tasks import make_task
from rlcore.tasks.row_tasks import Question, RowError, pick_question

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "2+2?"}
SAID = {"role": "assistant", "content": "4"}
AGAIN = {"role": "user", "content": "3+3?"}
GRADER = "def grade(item, response):\n    return float(response == item.answer)\n"


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"question": "2+2?"}, Question("2+2?")),
        ({"prompt": [USER]}, Question("2+2?")),
        ({"messages": [USER, SAID]}, Question("2+2?", (), "4")),
        ({"messages": [SYSTEM, USER]}, Question("2+2?", (SYSTEM, USER))),
        (
            {"messages": [SYSTEM, USER, SAID, AGAIN]},
            Question("3+3?", (SYSTEM, USER, SAID, AGAIN)),
        ),
        ({"messages": [SYSTEM, USER, SAID]}, Question("2+2?", (SYSTEM, USER), "4")),
        ({"question": None, "prompt": "2+2?", "messages": [AGAIN]}, Question("2+2?")),
        ({"prompt": [{**USER, "name": None, "tool_calls": None}]}, Question("2+2?")),
        ({"prompt": [{**USER, "name": "Ada"}]}, Question("2+2?", ({**USER, "name": "Ada"},))),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]},
            Question("2+2?"),
        ),
        (
            {"messages": {"role": ["system", "user"], "content": ["Be brief.", "2+2?"]}},
            Question("2+2?", (SYSTEM, USER)),
        ),
    ],
)
def test_a_text_and_messages_are_read_out_of_the_column_that_is_there(row, asked):
    assert pick_question(row, None) == asked


@pytest.mark.parametrize("field", ["messages", "prompt", "chat"])
def test_a_conversation_that_is_stored_as_json_text_is_read(field):
    stored = json.dumps([SYSTEM, USER, SAID])
    asked = pick_question({field: stored}, field)
    assert asked == Question("2+2?", (SYSTEM, USER), "4")
    assert pick_question({"messages": "Is [1, 2] a list?"}, None) == Question("Is [1, 2] a list?")
    assert pick_question({"question": "[1, 2] + [3]?"}, None) == Question("[1, 2] + [3]?")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (str([USER, SAID]), "field messages holds the messages of a conversation as text that is"),
        (json.dumps([USER])[:-1], "field messages holds the messages of a conversation as text"),
        ('[{"role": "user", "content": NaN}]', "field messages.0.content is NaN"),
        ('[{"role": "user", "content": "\\ud83d"}]', "field messages.0.content has a lone surr"),
        ("[" * 5000, "field messages holds the messages of a conversation as text"),
    ],
)
def test_text_that_is_nearly_a_conversation_is_refused(text, said):
    with pytest.raises(RowError) as error:
        pick_question({"messages": text}, None)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"content": "So", "prefix": True}, "the key prefix"),
        ({"content": "<think>\nWell, "}, "its <think> is not closed"),
        ({"content": "The answer is <answer>"}, "it ends with <answer>"),
        ({"content": "```python\n"}, "its last code block is not closed"),
        ({"content": " "}, "it has no text"),
    ],
)
def test_a_prefill_is_no_worked_answer(turn, said):
    with pytest.raises(RowError) as error:
        pick_question({"messages": [USER, {"role": "assistant", **turn}]}, None)
    assert f"ends with an assistant turn that is begun and not finished ({said})" in str(
        error.value
    )


def test_a_named_column_counts_before_the_usual_ones():
    row = {"question": "no", "chats": {"first": [SYSTEM, AGAIN]}}
    assert pick_question(row, "chats.first") == Question("3+3?", (SYSTEM, AGAIN))


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}


def test_calls_and_answers_of_tools_are_the_templates_to_read():
    tool = {"role": "tool", "content": "4", "tool_call_id": "a"}
    asked = pick_question({"messages": [USER, CALL, tool]}, None)
    assert asked == Question("4", (USER, {**CALL, "content": ""}, tool))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "field messages holds no message"),
        ([SAID], "field messages holds no message before the assistant's"),
        ([USER, SYSTEM], "field messages ends with a system turn"),
        ([SYSTEM, {"role": "user", "content": " "}], "ends with an empty user turn"),
        (["2+2?"], "field messages.0 is str, not a message"),
        ([{"from": "human", "value": "2+2?"}], "has role None, not one of system"),
        ([{"from": "human", "value": "2+2?"}], "(the message has: from, value)"),
        ([{"role": "user", "content": None}], "field messages.0 has no text"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "field messages.0 has parts other than text: ['image']",
        ),
        (7.5j, "field messages is complex"),
    ],
)
def test_what_is_no_conversation_is_refused_by_field(value, said):
    with pytest.raises(RowError) as error:
        pick_question({"messages": value}, "messages")
    assert said in str(error.value)


@pytest.fixture
def grader(tmp_path):
    (tmp_path / "mine.py").write_text(GRADER)
    return f"{tmp_path}/mine.py:grade"


def test_a_file_of_conversations_keeps_its_system_turns(tmp_path, grader):
    path = tmp_path / "chats.jsonl"
    rows = [{"messages": [SYSTEM, USER, SAID], "answer": "4"}, {"prompt": [AGAIN], "answer": "6"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = {"train_path": str(path), "grader": grader, "instruction": "Digits only."}
    task = make_task("file", args)
    first, second = task.item("train", 0), task.item("train", 1)
    asked = {"role": "user", "content": "2+2?\nDigits only."}
    assert first.question == "2+2?\nDigits only."
    assert first.messages == (SYSTEM, asked) and first.opening() == [SYSTEM, asked]
    assert second.messages == () and second.opening()[0]["content"] == "3+3?\nDigits only."
    assert (task.worked_answer(first), task.worked_answer(second)) == ("4", None)
    assert task.item("train", 0) == first  # the records themselves are unchanged
    assert task.grade(first, "4").reward == 1.0


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_shipped_tasks_over_files_read_conversations_too(tmp_path, name):
    path = tmp_path / "chats.parquet"
    row = {"prompt": [SYSTEM, USER], "answer": "so #### 4" if name == "gsm8k" else "4"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    task = make_task(name, {"train_path": str(path), "question_field": "prompt"})
    item = task.item("train", 0)
    assert (item.question, item.messages, item.answer) == ("2+2?", (SYSTEM, USER), "4")


def test_the_columns_that_were_found_are_listed(tmp_path, grader):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "2+2?", "label": "4"}\n')
    args = {"train_path": str(path), "grader": grader}
    with pytest.raises(UserError) as error:
        make_task("file", args)
    assert "row 1: it has none of the fields question, prompt, messages" in str(error.value)
    assert "(the row has: text, label)" in str(error.value)
    with pytest.raises(UserError, match=r"field answer is absent \(the row has: text, label\)"):
        make_task("file", {**args, "question_field": "text"})
    named = make_task("file", {**args, "question_field": "text", "answer_field": "label"})
    assert named.item("train", 0).answer == "4"
