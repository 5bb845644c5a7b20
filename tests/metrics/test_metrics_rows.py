"""metrics.jsonl on a real disk."""

import json
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
from timing import wait_until

from rlcore.errors import NoSpace, StageError, UserError
from rlcore.metrics.rows import RowFile, RowTail, read_rows, sanitize


def fill(path, steps, **extra):
    rows = RowFile(path)
    for step in steps:
        rows.log(sanitize({"step": step, "reward/mean": step / 10, **extra}))
    return rows


def test_rows_are_readable_as_soon_as_they_are_logged(tmp_path):
    rows = RowFile(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        rows.log(sanitize({"step": step}))
        assert [r["step"] for r in read_rows(rows.path)] == list(range(1, step + 1))


def test_repeated_and_skipped_steps_are_refused(tmp_path):
    rows = fill(tmp_path / "metrics.jsonl", [1, 2])
    for step in (2, 1, 4):
        with pytest.raises(ValueError, match=f"step {step} cannot follow"):
            rows.log(sanitize({"step": step}))
    rows.log(sanitize({"step": 3}))
    assert len(read_rows(rows.path)) == 3


def test_a_row_needs_a_step_and_numbers(tmp_path):
    rows = RowFile(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="integer step"):
        rows.log(sanitize({"reward/mean": 1.0}))
    with pytest.raises(TypeError, match="reward/mean"):
        sanitize({"step": 1, "reward/mean": "high"})


def test_nan_becomes_null_and_is_counted():
    row = sanitize(
        {
            "a": float("nan"),
            "b": np.float32("inf"),
            "c": None,
            "policy_version": 4,
            "step": np.int64(3),
        }
    )
    assert list(row) == ["step", "policy_version", "a", "b", "c", "metrics/nonfinite"]
    assert (row["a"], row["b"], row["c"], row["metrics/nonfinite"]) == (None, None, None, 2)
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_resume_drops_later_rows_and_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    fill(path, range(1, 8)).close()
    again = RowFile(path)
    assert again.truncate_after(4) == ""
    again.log(sanitize({"step": 5, "reward/mean": 9.0}))
    assert [r["step"] for r in read_rows(path)] == [1, 2, 3, 4, 5]
    assert read_rows(path)[-1]["reward/mean"] == 9.0
    assert list(tmp_path.iterdir()) == [path]


def test_missing_rows_are_said_and_forbid_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    fill(path, [1, 2]).close()
    rows = RowFile(path)
    assert "has no rows of steps 3 to 4" in rows.truncate_after(4)
    rows.log(sanitize({"step": 5}))
    assert [r["step"] for r in read_rows(path)] == [1, 2, 5]
    assert RowFile(path).truncate_after(5) == ""  # the hole stays, and is said once


@pytest.mark.parametrize("left", [[], [1, 2], [1, 4], [1, 2, 3, 4, 5]])
def test_missing_rows_come_from_the_checkpoint_s_copy(tmp_path, left):
    path, copy = tmp_path / "metrics.jsonl", tmp_path / "copy.jsonl"
    fill(copy, range(1, 7)).close()
    for step in left:
        with path.open("a") as file:
            file.write(json.dumps({"step": step, "own": 1.0}) + "\n")
    rows = RowFile(path)
    said = rows.truncate_after(5, copy)
    assert ("were missing" in said) == (len(left) < 5) and "has no rows" not in said
    rows.log(sanitize({"step": 6}))
    assert [r["step"] for r in read_rows(path)] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in read_rows(path) if "own" in r] == left


def test_resume_without_rows_starts_after_the_step(tmp_path):
    rows = RowFile(tmp_path / "metrics.jsonl")
    rows.truncate_after(4)
    with pytest.raises(ValueError, match="step 1 cannot follow"):
        rows.log(sanitize({"step": 1}))
    rows.log(sanitize({"step": 5}))


@pytest.mark.parametrize("tail", ['{"step": 3, "rew', '{"step": 3}', '{"step": 3, "rew\n'])
def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    fill(path, [1, 2]).close()
    with path.open("a") as file:
        file.write(tail)
    assert [r["step"] for r in read_rows(path)] == [1, 2]
    fill(path, [3])
    assert [r["step"] for r in read_rows(path)] == [1, 2, 3]


@pytest.mark.parametrize("lines", ["[1]\n{}\n", "{\n}\n\n", '{"step": 2}\n{"step": 2}\n'])
def test_a_damaged_file_is_refused_by_name(tmp_path, lines):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines)
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        RowFile(path)


def test_a_full_disk_is_one_sentence(tmp_path):
    rows = RowFile(tmp_path / "metrics.jsonl")
    rows.path.symlink_to("/dev/full")
    with pytest.raises(NoSpace, match=r"metrics\.jsonl.*No space left on device \(\d+ bytes"):
        rows.log(sanitize({"step": 1}))


def test_a_row_that_was_cut_short_leaves_nothing_and_can_be_written_again(tmp_path):
    """A file that may grow by part of a row, as a disk that becomes full in its middle."""
    path = tmp_path / "metrics.jsonl"
    rows = fill(path, [1])
    row, whole = sanitize({"step": 2, "reward/mean": 0.5}), path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 5, limits[1]))
        with pytest.raises(StageError, match="could not be written: File too large"):
            rows.log(row)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == whole
    rows.log(row)
    assert [r["step"] for r in read_rows(path)] == [1, 2]


@pytest.mark.processes
def test_a_killed_writer_leaves_whole_consecutive_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys, itertools\nfrom rlcore.metrics.rows import RowFile, sanitize\n"
        "rows = RowFile(sys.argv[1])\n"
        "for s in itertools.count(1): rows.log(sanitize({'step': s, 'x': 0.5}))"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
    wait_until(lambda: len(read_rows(path)) >= 20, 30, "twenty rows")
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    steps = [r["step"] for r in read_rows(path)]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 20
    fill(path, [len(steps) + 1])


def test_a_tail_gives_each_row_once_and_notices_another_file(tmp_path):
    rows, tail = RowFile(tmp_path / "metrics.jsonl"), RowTail(tmp_path / "metrics.jsonl")
    assert tail.new() == [] and not tail.rewritten()
    for step in (1, 2, 3):
        rows.log(sanitize({"step": step}))
        assert [r["step"] for r in tail.new()] == [step]
    assert not tail.rewritten()
    rows.truncate_after(1)
    for step in (2, 3, 4):
        rows.log(sanitize({"step": step}))
    # longer than what was read, but not its continuation
    assert tail.rewritten() and tail.new() == []


def test_a_tail_names_the_broken_line_by_its_place_in_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    fill(path, (1, 2))
    tail = RowTail(path)
    assert len(tail.new()) == 2
    with path.open("a") as file:
        file.write('broken\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:3"):
        tail.new()
