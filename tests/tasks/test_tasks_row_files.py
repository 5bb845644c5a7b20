"""Arrow files, and the folders that Hugging Face data sets are saved to."""

import json

import pyarrow
import pyarrow.ipc
import pytest

from rlcore.tasks.arguments import ArgumentError
from rlcore.tasks.records import rows

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
