import asyncio
import json
from types import SimpleNamespace

import pytest

from rlcore.errors import DeadlineExceeded, StageError, UserError
from rlcore.runtime import checkpoint
from rlcore.runtime.plan import Progress
from rlcore.runtime.saver import RunSaver


def _begin(root, step):
    """A folder with what no checkpoint is without."""
    folder = checkpoint.begin(root, step)
    for part in checkpoint.PARTS:
        (folder / part).parent.mkdir()
        (folder / part).write_text("{}")
    return folder


def _write(root, step, *, keep=2, payload=b"weights"):
    folder = _begin(root, step)
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


def _commit(root, step, keep, **held):
    checkpoint.commit(root, step, _begin(root, step), {}, keep=keep, **held)


def test_retention_by_number_by_step_and_by_metric(tmp_path):
    keep, scores = checkpoint.Retention(last=1, every=4, best="eval/digits/greedy"), {}
    for step, accuracy in [(2, 0.1), (4, 0.2), (6, 0.9), (8, 0.3), (10, None), (12, 0.5), (14, 0.9)]:
        scores |= {} if accuracy is None else {str(step): accuracy}
        _commit(tmp_path, step, keep, scores=scores)
    assert _names(tmp_path) == ["step_000004", "step_000008", "step_000012", "step_000014"]  # of two best the newer

    least = checkpoint.Retention(last=1, best="eval/digits/greedy", best_is="min")
    _commit(tmp_path, 15, least, scores=scores)
    assert _names(tmp_path) == ["step_000004", "step_000015"]


def test_a_score_that_comes_late_marks_the_checkpoint_of_its_version(tmp_path):
    keep = checkpoint.Retention(last=1, best="eval/digits/greedy")
    _commit(tmp_path, 10, keep, awaited=10)
    _commit(tmp_path, 12, keep, awaited=10)  # held until its score is there
    assert _names(tmp_path) == ["step_000010", "step_000012"]
    _commit(tmp_path, 20, keep, scores={"10": 0.9}, awaited=20)
    _commit(tmp_path, 30, keep, scores={"10": 0.9, "20": 0.4}, awaited=30)
    assert _names(tmp_path) == ["step_000010", "step_000030"]


def test_damaged_checkpoints_crowd_no_valid_one_out(tmp_path):
    for step in (4, 6, 8):
        _write(tmp_path, step, keep=3)
    for step in (6, 8):
        (tmp_path / checkpoint.name_of(step) / checkpoint.MANIFEST).unlink()
    (tmp_path / "step_000008" / "controller.json").write_text("{")
    _write(tmp_path, 5, keep=1)
    assert "step_000005" in _names(tmp_path)  # what was just written stays, whatever else is there

    (tmp_path / "step_000009").mkdir()
    notes = []
    assert checkpoint.resume_from(tmp_path, notes.append).name == "step_000005"
    assert _names(tmp_path) == ["step_000005"] and (tmp_path / ".damaged-step_000009").is_dir()
    assert len(notes) == 2
    _write(tmp_path, 6, keep=2)
    assert _names(tmp_path) == ["step_000005", "step_000006"]


def test_a_resume_begins_anew_only_where_no_checkpoint_was_ever_written(tmp_path):
    root = tmp_path / "checkpoints"
    assert checkpoint.resume_from(root, lambda _: None) is None
    (_write(root, 3) / "learner" / "w.bin").unlink()
    for _ in range(2):  # a refusal moves nothing
        with pytest.raises(UserError, match=rf"run_dir={tmp_path} .*step_000003: learner/w.bin is missing.*restore"):
            checkpoint.resume_from(root, lambda _: None)


@pytest.mark.parametrize("part", checkpoint.PARTS)
def test_a_folder_that_a_part_is_missing_from_is_no_checkpoint(tmp_path, part):
    folder = _begin(tmp_path, 1)
    (folder / part).unlink()
    with pytest.raises(StageError, match=part):
        checkpoint.commit(tmp_path, 1, folder, {}, keep=checkpoint.Retention())
    assert not _names(tmp_path)


def _saver(root, notes, keep_best=None):
    section = SimpleNamespace(keep=2, keep_every=0, keep_best=keep_best, best_is="max")
    return RunSaver(SimpleNamespace(checkpoint=section, seed=0), root, "model", notes.append)


class _Controller:
    """A controller whose learner and buffer write their parts, or time out."""

    def __init__(self, folder, late=False, awaited=None):
        self.progress, self.late = Progress(step=4, published=4, evaluated=4, scores={"2": 0.5}), late
        self.evaluator, self.prompts = SimpleNamespace(awaited=awaited), SimpleNamespace(state=dict)

    async def cut_parts(self, learner_folder):
        self.parts = _begin(checkpoint.Path(learner_folder).parents[1], self.progress.step)

    async def write_parts(self, buffer_folder):
        if self.late:
            raise DeadlineExceeded("waited 600 s for the learner to write its checkpoint")


def test_a_disk_that_is_too_slow_costs_a_checkpoint_and_only_the_last_one_the_run(tmp_path):
    async def scenario():
        notes = []
        saver = _saver(tmp_path, notes)
        await saver.begin(_Controller(tmp_path, late=True))
        await saver.done()
        assert "could not be written (waited 600 s" in notes[0]
        await saver.begin(_Controller(tmp_path, late=True))
        with pytest.raises(StageError, match="last checkpoint could not be written"):
            await saver.done(last=True)
        await saver.begin(_Controller(tmp_path))
        await saver.done(last=True)
        assert _names(tmp_path) == ["step_000004"]

    asyncio.run(scenario())


@pytest.mark.parametrize(("awaited", "evaluated"), [(None, 4), (4, -1)])
def test_scores_outlive_a_resume_and_an_evaluation_under_way_is_started_again(tmp_path, awaited, evaluated):
    async def scenario():
        saver = _saver(tmp_path, [])
        await saver.begin(_Controller(tmp_path, awaited=awaited))
        await saver.done(last=True)
        progress = Progress(**checkpoint.state_of(tmp_path / "step_000004")["progress"])
        assert progress.scores == {"2": 0.5} and progress.evaluated == evaluated

    asyncio.run(scenario())


def test_a_metric_that_no_evaluation_has_is_told(tmp_path):
    notes, scores = [], {}
    saver = _saver(tmp_path, notes, keep_best="eval/digits/gredy")
    saver.scored(3, {"eval/digits/greedy": 0.5, "eval/policy_version": 3}, scores)
    assert not scores and "eval/digits/gredy" in notes[0] and "eval/digits/greedy" in notes[0]
    _saver(tmp_path, notes, keep_best="eval/digits/greedy").scored(3, {"eval/digits/greedy": 0.5}, scores)
    assert scores == {"3": 0.5} and len(notes) == 1


def test_steps_of_seven_digits_come_after_those_of_six(tmp_path):
    for step in (999_999, 1_000_000):
        _write(tmp_path, step, payload=b"")
    assert checkpoint.newest_valid(tmp_path, lambda _: None).name == "step_1000000"
