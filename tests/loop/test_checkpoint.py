import asyncio
import hashlib
import json
import os
import threading
import time
from pathlib import Path

import pytest
from timing import deadline, wait_until

from rlcore.errors import DeadlineExceeded, OwnershipLost, StageError, UserError
from rlcore.loop import checkpoint
from rlcore.loop.role_protocols import Clients
from rlcore.loop.run_plan import Progress
from rlcore.loop.saver import CheckpointRequest, Disk, Saver
from rlcore.loop.specs import CheckpointSpec

GREEDY = "eval/digits/greedy"


def _fill(folder):
    """What no checkpoint is without."""
    for part in checkpoint.PARTS:
        (folder / part).parent.mkdir(exist_ok=True)
        (folder / part).write_text("{}")
    (folder / checkpoint.STATE).write_text("{}")


def _write(root, step, *, keep=2, payload=b"weights"):
    _commit(root, step, CheckpointSpec(keep=keep), payload=payload * step)
    return root / checkpoint.name_of(step)


def _commit(root, step, spec, *, scores=None, awaited=None, payload=b""):
    with checkpoint.new_checkpoint(root, step) as folder:
        _fill(folder)
        (folder / "learner" / "w.bin").write_bytes(payload)
        (folder / checkpoint.STATE).write_text(json.dumps({"progress": {"step": step}}))
    newest = root / checkpoint.name_of(step)
    checkpoint.prune(root, spec, scores or {}, newest=newest, awaited=awaited)


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


def test_every_file_and_folder_is_flushed_before_the_rename(tmp_path, monkeypatch):
    flushed, order, fsync = {}, [], os.fsync

    def recorded(fd):
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        flushed[path] = path.stat().st_size  # of the content that the flush covers
        order.append(path)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", recorded)
    newest = _write(tmp_path, 3)
    beside = next(path for path in flushed if path.parent == tmp_path)
    for path in newest.rglob("*"):
        at = beside / path.relative_to(newest)
        if path.name == checkpoint.MANIFEST:
            at = at.with_name(f".{path.name}.partial")
        assert at in flushed, path
        assert path.is_dir() or flushed[at] == path.stat().st_size
    assert order[-2:] == [beside, tmp_path]  # before the rename, and the rename itself


def test_a_half_written_one_is_never_seen(tmp_path):
    _write(tmp_path, 1)
    with pytest.raises(KeyboardInterrupt), checkpoint.new_checkpoint(tmp_path, 2) as folder:
        _fill(folder)
        assert checkpoint.newest_valid(tmp_path, lambda _: None).name == "step_000001"
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


def test_what_a_killed_writer_left_is_not_mixed_with_the_next(tmp_path):
    with checkpoint.new_checkpoint(tmp_path, 2) as folder:
        beside = folder
        _fill(folder)
    beside.mkdir()
    (beside / "learner.bin").write_bytes(b"half")
    with checkpoint.new_checkpoint(tmp_path, 2) as folder:
        assert list(folder.iterdir()) == []
        _fill(folder)


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
    keep, scores = CheckpointSpec(keep=1, keep_every=4, keep_best=GREEDY), {}
    for step, accuracy in [
        (2, 0.1),
        (4, 0.2),
        (6, 0.9),
        (8, 0.3),
        (10, None),
        (12, 0.5),
        (14, 0.9),
    ]:
        scores |= {} if accuracy is None else {str(step): accuracy}
        _commit(tmp_path, step, keep, scores={GREEDY: scores})
    assert _names(tmp_path) == [
        "step_000004",
        "step_000008",
        "step_000012",
        "step_000014",
    ]  # of two best the newer

    least = CheckpointSpec(keep=1, keep_best=GREEDY, best_is="min")
    _commit(tmp_path, 15, least, scores={GREEDY: scores})
    assert _names(tmp_path) == ["step_000004", "step_000015"]


def test_a_score_that_comes_late_marks_the_checkpoint_of_its_version(tmp_path):
    keep = CheckpointSpec(keep=1, keep_best=GREEDY)
    _commit(tmp_path, 10, keep, awaited=10)
    _commit(tmp_path, 12, keep, awaited=10)  # held until its score is there
    assert _names(tmp_path) == ["step_000010", "step_000012"]
    _commit(tmp_path, 20, keep, scores={GREEDY: {"10": 0.9}}, awaited=20)
    _commit(tmp_path, 30, keep, scores={GREEDY: {"10": 0.9, "20": 0.4}}, awaited=30)
    assert _names(tmp_path) == ["step_000010", "step_000030"]


def test_scores_of_another_metric_mark_no_checkpoint(tmp_path):
    keep, other = CheckpointSpec(keep=1, keep_best="eval/digits/mean@1"), {"4": 0.9}
    for step in (4, 6, 8):
        _commit(tmp_path, step, keep, scores={GREEDY: other, keep.keep_best: {"6": 0.1}})
    assert _names(tmp_path) == ["step_000006", "step_000008"]


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
        with pytest.raises(
            UserError, match=rf"run_dir={tmp_path} .*step_000003: learner/w.bin is missing.*restore"
        ):
            checkpoint.resume_from(root, lambda _: None)


@pytest.mark.parametrize("part", checkpoint.PARTS)
def test_a_folder_that_a_part_is_missing_from_is_no_checkpoint(tmp_path, part):
    with pytest.raises(StageError, match=part), checkpoint.new_checkpoint(tmp_path, 1) as folder:
        _fill(folder)
        (folder / part).unlink()
    assert not _names(tmp_path)


def test_a_rank_that_wrote_elsewhere_is_missed(tmp_path):
    with (
        pytest.raises(StageError, match=r"lacks 1 files of learner ranks \(learner/b\).*run_dir"),
        checkpoint.new_checkpoint(tmp_path, 1) as folder,
    ):
        _fill(folder)
        (folder / "learner" / "a").write_text("")
        listed = json.dumps({"files": {"a": {}, "b": {}}})
        (folder / "learner" / "learner.json").write_text(listed)
    assert not _names(tmp_path)


class _Learner:
    """Writes its part, or times out."""

    late = False

    async def save(self, folder, *, in_phase):
        self.folder = checkpoint.Path(folder).parent

    async def saved(self, *, timeout_s):
        if self.late:
            raise DeadlineExceeded("waited 600 s for the learner to write its checkpoint")
        _fill(self.folder)


class _Buffer:
    async def snapshot(self):
        pass

    async def save(self, folder, *, timeout_s):
        checkpoint.Path(folder).mkdir()


def _saver(root, notes, **settings):
    spec, facts = CheckpointSpec(**settings), {"model_path": "model", "seed": 0}
    return Saver(
        spec, root, facts, note=notes.append, is_accuracy=lambda name: name.endswith("greedy")
    )


def _cut(awaited=None):
    progress = Progress(step=4, published=4, evaluated=4, scores={GREEDY: {"2": 0.5}})
    return CheckpointRequest(progress, {"cursor": 8}, in_phase=False, awaited=awaited)


def _clients():
    return Clients(buffer=_Buffer(), learner=_Learner(), scorer=None, watch=None)


def test_a_disk_that_is_too_slow_costs_a_checkpoint_and_only_the_last_one_the_run(tmp_path):
    async def scenario():
        notes, clients = [], _clients()
        saver = _saver(tmp_path, notes)
        clients.learner.late = True
        await saver.begin(clients, _cut())
        await saver.done()
        assert "could not be written (waited 600 s" in notes[0]
        await saver.begin(clients, _cut())
        with pytest.raises(StageError, match="last checkpoint could not be written"):
            await saver.done(last=True)
        wait_until(lambda: not any(tmp_path.iterdir()), 10, "what was written to be removed")
        clients.learner.late = False
        await saver.begin(clients, _cut(), last=True)
        await saver.done(last=True)
        assert _names(tmp_path) == ["step_000004"]
        state = checkpoint.state_of(tmp_path / "step_000004")
        assert state["prompts"] == {"cursor": 8} and state["model_path"] == "model"

    asyncio.run(scenario())


def test_a_hung_disk_costs_checkpoints_and_holds_up_nothing(tmp_path, monkeypatch):
    held, patience_s = threading.Event(), deadline(1)

    def hang(*args, **kwargs):
        held.wait()

    async def scenario():
        notes, clients = [], _clients()
        saver = _saver(tmp_path, notes, write_timeout_s=patience_s)
        monkeypatch.setattr(checkpoint, "replace_file", hang)  # as any call of a hung network disk
        await saver.begin(clients, _cut())
        assert saver.busy
        await saver.done()
        assert f"took more than {patience_s:g} s to seal" in notes[0]
        await saver.begin(clients, _cut())
        await saver.done()
        assert "has not ended what it was asked for" in notes[1]
        monkeypatch.undo()
        held.set()
        await saver.begin(clients, _cut(), last=True)
        await saver.done(last=True)
        assert "written again, after 2 that could not be: step_000004" in notes[2]

    try:
        asyncio.run(scenario())
    finally:
        held.set()


def test_a_job_whose_result_is_there_does_not_count_as_running():
    """The last checkpoint of a run may begin right after the one before it."""

    class SlowLock:
        """The disk's thread loses its turn when it is about to count its job as ended."""

        def __enter__(self):
            if threading.current_thread().name == "disk":
                time.sleep(0.1)

        def __exit__(self, *error):
            pass

    async def scenario():
        disk = Disk()
        disk._lock = SlowLock()
        assert await disk.run(lambda: 7, timeout_s=deadline(10), what="count") == 7
        assert disk.running == 0

    asyncio.run(scenario())


def test_the_last_checkpoint_waits_for_what_the_disk_still_does(tmp_path):
    async def scenario():
        notes, removed = [], threading.Event()
        saver = _saver(tmp_path, notes)
        saver._disk.leave(removed.wait)  # as the removal of an earlier one
        await saver.begin(_clients(), _cut())
        await saver.done()
        assert "has not ended what it was asked for" in notes[0]
        asyncio.get_running_loop().call_soon(removed.set)
        await saver.begin(_clients(), _cut(), last=True)
        await saver.done(last=True)
        assert _names(tmp_path) == ["step_000004"]

    asyncio.run(scenario())


def test_a_hung_disk_does_not_keep_the_process_from_ending(tmp_path):
    hung, disk = threading.Event(), Disk()

    async def scenario():
        with pytest.raises(DeadlineExceeded, match=r"took more than 0\.1 s to read"):
            await disk.run(hung.wait, timeout_s=0.1, what="read")

    asyncio.run(scenario())  # ends its executors, and would wait for the threads of a pool
    assert disk.running == 1
    hung.set()


def test_a_full_disk_costs_a_checkpoint(tmp_path):
    async def scenario():
        notes = []
        (tmp_path / "checkpoints").write_text("a file where the folder should be")
        saver = _saver(tmp_path / "checkpoints", notes)
        await saver.begin(_clients(), _cut())
        await saver.done()
        assert "could not be written" in notes[0] and "the newest is none" in notes[0]

    asyncio.run(scenario())


@pytest.mark.parametrize(("awaited", "evaluated"), [(None, 4), (4, -1)])
def test_scores_outlive_a_resume_and_an_evaluation_under_way_is_started_again(
    tmp_path, awaited, evaluated
):
    async def scenario():
        saver = _saver(tmp_path, [])
        await saver.begin(_clients(), _cut(awaited))
        await saver.done(last=True)
        progress = Progress(**checkpoint.state_of(tmp_path / "step_000004")["progress"])
        assert progress.scores == {GREEDY: {"2": 0.5}} and progress.evaluated == evaluated

    asyncio.run(scenario())


def test_a_metric_that_no_evaluation_has_is_named(tmp_path):
    notes, scores = [], {}
    saver = _saver(tmp_path, notes, keep_best="eval/digits/gredy")
    saver.scored(3, {"eval/digits/greedy": 0.5, "eval/policy_version": 3}, scores)
    assert not scores and "eval/digits/gredy" in notes[0] and "eval/digits/greedy" in notes[0]
    saver = _saver(tmp_path, notes, keep_best="eval/digits/greedy")
    saver.scored(3, {"eval/digits/greedy": 0.5}, scores)
    assert scores == {GREEDY: {"3": 0.5}} and len(notes) == 1


def test_steps_of_seven_digits_come_after_those_of_six(tmp_path):
    for step in (999_999, 1_000_000):
        _write(tmp_path, step, payload=b"")
    assert checkpoint.newest_valid(tmp_path, lambda _: None).name == "step_1000000"


MANIFESTS = {
    "a list": [],
    "no files": {"step": 5, "files": {}},
    "files in a list": {"step": 5, "files": []},
    "a number for a file": {"step": 5, "files": {"learner/w.bin": 7}},
    "nothing": None,
}


@pytest.mark.parametrize("manifest", MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_of_another_shape_is_passed_over(tmp_path, manifest):
    _write(tmp_path, 4)
    (_write(tmp_path, 5) / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    notes = []
    assert checkpoint.resume_from(tmp_path, notes.append).name == "step_000004"
    assert "step_000005 is passed over: its manifest" in notes[0]


OTHERS = {
    checkpoint.STATE: [
        ({"progress": {"step": 5, "epoch_of_tomorrow": 1}}, "its progress has epoch_of_tomorrow"),
        ({"progress": [5]}, "is of another format"),
        ({}, "is of another format"),
        ([], "is of another format"),
    ],
    "learner/learner.json": [
        ([], "is of another format"),
        ({"files": ["a", "b"]}, "is of another format"),
        ({"format": 2, "files": {}}, "is of another format"),
    ],
}


@pytest.mark.parametrize(
    ("name", "content", "why"), [(n, c, w) for n, cases in OTHERS.items() for c, w in cases]
)
def test_a_whole_checkpoint_of_another_version_is_passed_over_and_kept(
    tmp_path, name, content, why
):
    for step in (4, 5):
        with checkpoint.new_checkpoint(tmp_path, step) as folder:
            _fill(folder)
            state = json.dumps({"progress": {"step": step}})
            (folder / checkpoint.STATE).write_text(state)
            if step == 5:
                if name == "learner/learner.json":  # a list of files that no rank has written
                    for file in ("a", "b"):
                        (folder / "learner" / file).write_text("")
                (folder / name).write_text(json.dumps(content if name == checkpoint.STATE else {}))
    if name != checkpoint.STATE:
        _rewrite(tmp_path / "step_000005", name, json.dumps(content))
    notes = []
    assert checkpoint.resume_from(tmp_path, notes.append).name == "step_000004"
    assert len(notes) == 1 and "step_000005 is passed over" in notes[0] and why in notes[0]
    assert checkpoint.sweep(tmp_path) == ""
    assert (tmp_path / ".other-version-step_000005" / checkpoint.MANIFEST).is_file()


def _rewrite(folder, name, text):
    """As a writer of another version would have left it: whole."""
    (folder / name).write_text(text)
    manifest = json.loads((folder / checkpoint.MANIFEST).read_text())
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    manifest["files"][name] = [len(text), digest]
    (folder / checkpoint.MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["step_000005.bak", "step_000005 (copy)", "step_best", "step_"])
def test_other_names_in_the_folder_are_left_alone(tmp_path, name):
    _write(tmp_path, 4)
    (tmp_path / name).mkdir()
    (tmp_path / "step_000009").write_text("a file")
    _write(tmp_path, 5, keep=1)
    assert checkpoint.newest_name(tmp_path) == "step_000005"
    assert checkpoint.resume_from(tmp_path, lambda _: None).name == "step_000005"
    assert (tmp_path / name).is_dir() and not (tmp_path / "step_000004").exists()


def test_a_removal_that_is_cut_off_leaves_no_checkpoint_that_looks_whole(tmp_path, monkeypatch):
    """Killed at any moment of a removal: what is left has another name, and the next start frees
    it."""
    for step in (1, 2):
        _write(tmp_path, step)

    def killed(folder, **_):
        if folder.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint.shutil, "rmtree", killed)
        _write(tmp_path, 3)
    assert _names(tmp_path) == ["step_000002", "step_000003"]
    assert (tmp_path / ".removed-step_000001" / checkpoint.MANIFEST).is_file()
    assert ".removed-step_000001" in _swept(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"step_000002", "step_000003"}


def _swept(root):
    said = checkpoint.sweep(root)
    for thread in threading.enumerate():
        if thread.name == "sweep":
            thread.join(30)
    return said


def test_what_killed_writers_left_is_swept_and_the_only_good_copy_is_not(tmp_path):
    _write(tmp_path, 4).rename(tmp_path / ".step_000004.stale")  # killed between two renames
    for name in (".step_000004.partial", ".step_000005.partial", ".damaged-step_000003"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w.bin").write_bytes(b"half")
    said = _swept(tmp_path)
    assert said.startswith("3 leftovers") and ".damaged-step_000003" in said
    assert [p.name for p in tmp_path.iterdir()] == ["step_000004"]
    assert checkpoint.problem_with(tmp_path / "step_000004") is None
    assert _swept(tmp_path) == ""


def test_a_removal_that_fails_is_no_unwritten_checkpoint(tmp_path, monkeypatch):
    def refuse(folder, **_):
        if folder.exists():
            raise PermissionError(13, "Permission denied", str(folder))

    async def scenario():
        notes = []
        saver = _saver(tmp_path, notes, keep=1)
        _write(tmp_path, 1)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.shutil, "rmtree", refuse)
            await saver.begin(_clients(), _cut())
            await saver.done(last=True)  # exit code 0
            assert "old checkpoints could not be removed" in notes[0]
            assert "checkpoint.keep=1" in notes[0] and len(notes) == 1
            assert saver.metrics() == {"checkpoint/step": 4.0, "checkpoint/failed": 0.0}

    asyncio.run(scenario())
    assert _names(tmp_path) == ["step_000004"]


def test_a_checkpoint_of_a_folder_that_is_another_command_s_is_not_written(tmp_path):
    def guard():
        raise OwnershipLost("run_dir was taken over by rlcore train")

    async def scenario():
        saver = Saver(CheckpointSpec(), tmp_path, {}, note=[].append, is_accuracy=bool, guard=guard)
        await saver.begin(_clients(), _cut())
        with pytest.raises(OwnershipLost):
            await saver.done()

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []
