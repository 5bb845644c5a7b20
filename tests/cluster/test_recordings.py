"""Recorded batches: whole or refused, and no more of them than was asked for."""

import pytest

from rlcore.cluster.recordings import (
    Recorder,
    RecordingError,
    folder_of,
    read_recording,
    steps_in,
    write_recording,
)
from rlcore.loop.checkpoint import PINNED, kept
from rlcore.loop.specs import CheckpointSpec
from rlcore.metrics.health import add_warned
from rlcore.serialization import StoredEpisode, StoredGroup, dump_trajectory
from rlcore.testing.records import make_score, make_trajectory


def stored(group_id, samples=2):
    episodes = []
    for index in range(samples):
        t = make_trajectory(group_id=group_id, sample_index=index)
        score = make_score(t, 0.5)
        episodes.append(StoredEpisode(score, (dump_trajectory(t),)))
    return StoredGroup(group_id, f"digits/train/{group_id}", 3, 4, tuple(episodes))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_share_is_read_as_it_was_written(tmp_path, count):
    groups = [stored(i) for i in range(count)]
    size = write_recording(tmp_path / "a" / "policy-0.bin", groups)
    assert size == (tmp_path / "a" / "policy-0.bin").stat().st_size
    assert read_recording(tmp_path / "a" / "policy-0.bin") == groups


@pytest.mark.parametrize("at", [0, 9, 40, -1])
def test_a_damaged_recording_is_refused_by_the_file_s_name(tmp_path, at):
    path = tmp_path / "policy-0.bin"
    write_recording(path, [stored(1)])
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=r"policy-0\.bin cannot be read"):
        read_recording(path)
    path.write_bytes(data[:30])
    with pytest.raises(RecordingError, match=r"policy-0\.bin cannot be read"):
        read_recording(path)
    path.unlink()
    with pytest.raises(RecordingError, match=r"policy-0\.bin cannot be read"):
        read_recording(path)


def test_batches_are_kept_back_to_the_checkpoint_before_the_last_steps(tmp_path):
    recorder = Recorder(tmp_path, "policy-0", steps=2, most_bytes=1e9)
    for step in range(3):
        recorder.keep(step, [stored(step)])
    assert steps_in(tmp_path / "recorder") == [0, 1, 2]  # no checkpoint: all from the first
    (tmp_path / "checkpoints" / "step_000003").mkdir(parents=True)
    recorder.keep(3, [stored(3)])
    assert steps_in(tmp_path / "recorder") == [0, 1, 2, 3]  # of the last two, one precedes it
    recorder.keep(4, [stored(4)])
    assert steps_in(tmp_path / "recorder") == [3, 4]


def test_a_full_budget_drops_the_oldest_and_says_so(tmp_path, capfd):
    size = write_recording(tmp_path / "one.bin", [stored(1)])
    recorder = Recorder(tmp_path, "policy-0", steps=4, most_bytes=2.5 * size)
    for step in range(4):
        recorder.keep(step, [stored(step)])
    assert steps_in(tmp_path / "recorder") == [2, 3]
    assert "dropped policy-0.bin of steps 2:" in capfd.readouterr().err


def test_shares_of_other_ranks_stay(tmp_path):
    one, other = (Recorder(tmp_path, f"policy-{i}", steps=1, most_bytes=1.0) for i in range(2))
    one.keep(0, [stored(0)])
    other.keep(0, [stored(1)])
    one.keep(1, [stored(2)])
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.bin"))
    assert names == [
        "recorder/step_000000/policy-1.bin",
        "recorder/step_000001/policy-0.bin",
    ]


def test_a_disk_that_refuses_ends_the_recording_and_not_the_run(tmp_path, capfd):
    (tmp_path / "recorder").write_text("a file where the folder should be")
    recorder = Recorder(tmp_path, "policy-0", steps=1, most_bytes=1e9)
    recorder.keep(0, [stored(0)])
    recorder.keep(1, [stored(1)])
    assert capfd.readouterr().err.count("the recorder is off") == 1


def test_a_resumed_run_writes_over_the_steps_that_it_takes_again(tmp_path):
    Recorder(tmp_path, "policy-0", steps=1, most_bytes=1e9).keep(5, [stored(1)])
    recorder = Recorder(tmp_path, "policy-0", steps=1, most_bytes=1e9)
    recorder.keep(5, [stored(2)])
    (again,) = read_recording(folder_of(tmp_path, 5) / "policy-0.bin")
    assert again.group_id == 2


def checkpoint_at(run_dir, step, size=10):
    folder = run_dir / "checkpoints" / f"step_{step:06d}"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(size))
    return folder


def recorded(run_dir, most_bytes, *, warned=6, last=11, size=10):
    """A run of 11 steps with a checkpoint after every second, of which step `warned` of
    metrics.jsonl warned."""
    recorder = Recorder(run_dir, "policy-0", steps=1, most_bytes=most_bytes)
    for step in range(last):
        if step and step % 2 == 0:
            checkpoint_at(run_dir, step, size)
        if step == warned:
            add_warned(run_dir, warned)
        recorder.keep(step, [stored(step)])
    return steps_in(run_dir / "recorder")


def test_a_warned_step_stays_with_the_checkpoint_before_it(tmp_path):
    assert recorded(tmp_path, 1e9) == [4, 5, 10]
    folders = sorted((tmp_path / "checkpoints").iterdir())
    assert [f.name for f in folders if (f / PINNED).exists()] == ["step_000004"]
    left = kept(folders, CheckpointSpec(keep=1), {}, None)
    assert sorted(f.name for f in left) == ["step_000004", "step_000010"]
    Recorder(tmp_path, "policy-0", steps=1, most_bytes=1e9).keep(11, [stored(11)])  # resumed
    assert steps_in(tmp_path / "recorder") == [4, 5, 10, 11]


def test_the_budget_costs_warned_steps_last_and_whole(tmp_path, capfd):
    size = write_recording(tmp_path / "one.bin", [stored(1)])
    assert recorded(tmp_path / "a", 3.5 * size) == [4, 5, 10]
    assert recorded(tmp_path / "b", 2.5 * size) == [10]
    assert not list((tmp_path / "b").rglob(PINNED))
    assert "dropped policy-0.bin of steps 5, 6:" in capfd.readouterr().err


def test_a_checkpoint_beyond_the_budget_is_not_kept_for_a_warned_step(tmp_path, capfd):
    size = write_recording(tmp_path / "one.bin", [stored(1)])
    assert recorded(tmp_path, 20 * size, size=21 * size) == [10]
    assert not list(tmp_path.rglob(PINNED))
    assert "dropped policy-0.bin of steps" in capfd.readouterr().err
