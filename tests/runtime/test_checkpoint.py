import json

import pytest

from rlcore.errors import UserError
from rlcore.runtime import checkpoint


def _write(root, step, *, keep=2, payload=b"weights"):
    folder = checkpoint.begin(root, step)
    (folder / "learner").mkdir()
    (folder / "learner" / "w.bin").write_bytes(payload * step)
    return checkpoint.commit(root, step, folder, {"progress": {"step": step}}, keep=checkpoint.Retention(keep))


def test_the_newest_valid_one_is_found_and_old_ones_are_dropped(tmp_path):
    for step in (1, 2, 3):
        _write(tmp_path, step)
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_000002", "step_000003"]
    found = checkpoint.newest_valid(tmp_path, lambda _: None)
    assert checkpoint.state_of(found) == {"progress": {"step": 3}}


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "no_manifest", "half_manifest"])
def test_a_damaged_one_is_passed_over_by_name(tmp_path, damage):
    _write(tmp_path, 4)
    newest = _write(tmp_path, 5)
    victim = newest / "learner" / "w.bin"
    if damage == "truncate":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif damage == "flip":
        victim.write_bytes(b"X" + victim.read_bytes()[1:])
    elif damage == "delete":
        victim.unlink()
    elif damage == "no_manifest":
        (newest / checkpoint.MANIFEST).unlink()
    else:
        text = (newest / checkpoint.MANIFEST).read_text()
        (newest / checkpoint.MANIFEST).write_text(text[: len(text) // 2])
    notes = []
    assert checkpoint.newest_valid(tmp_path, notes.append).name == "step_000004"
    assert len(notes) == 1 and "step_000005" in notes[0]


def test_a_half_written_one_is_never_seen(tmp_path):
    _write(tmp_path, 1)
    folder = checkpoint.begin(tmp_path, 2)
    (folder / "learner.bin").write_bytes(b"half")
    assert checkpoint.newest_valid(tmp_path, lambda _: None).name == "step_000001"
    again = checkpoint.begin(tmp_path, 2)
    assert list(again.iterdir()) == []


def test_the_same_step_can_be_written_again(tmp_path):
    _write(tmp_path, 1, payload=b"old")
    final = _write(tmp_path, 1, payload=b"new")
    assert (final / "learner" / "w.bin").read_bytes() == b"new"
    assert checkpoint.problem_with(final) is None
    assert json.loads((final / checkpoint.MANIFEST).read_text())["step"] == 1


def test_a_named_checkpoint_must_hold_one(tmp_path):
    with pytest.raises(UserError, match="holds no valid checkpoint"):
        checkpoint.require(str(tmp_path))
    _write(tmp_path / "checkpoints", 7)
    assert checkpoint.require(str(tmp_path)).name == "step_000007"


def _names(root):
    return [p.name for p in sorted(root.glob("step_*"))]


def test_retention_by_number_by_step_and_by_metric(tmp_path):
    keep = checkpoint.Retention(last=1, every=4, best="eval/digits/greedy")
    for step, accuracy in [(2, 0.1), (4, 0.2), (6, 0.9), (8, 0.3), (10, None), (12, 0.5), (14, 0.9)]:
        folder = checkpoint.begin(tmp_path, step)
        state = {"metrics": {} if accuracy is None else {"eval/digits/greedy": accuracy}}
        checkpoint.commit(tmp_path, step, folder, state, keep=keep)
    assert _names(tmp_path) == ["step_000004", "step_000008", "step_000012", "step_000014"]  # of two best the newer

    least = checkpoint.Retention(last=1, best="eval/digits/greedy", best_is="min")
    checkpoint.commit(tmp_path, 15, checkpoint.begin(tmp_path, 15), {}, keep=least)
    assert _names(tmp_path) == ["step_000004", "step_000015"]


def test_steps_of_seven_digits_come_after_those_of_six(tmp_path):
    for step in (999_999, 1_000_000):
        _write(tmp_path, step, payload=b"")
    assert checkpoint.newest_valid(tmp_path, lambda _: None).name == "step_1000000"
