"""A run whose steps are bounded, killed, resumed and replayed: real actors and a real learner."""

import json

import pytest
from conftest import rows, without_times
from equal_bits import differ

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.ranks]
# Batches two steps old, at a rate whose steps the bound shortens.
LATE = ("schedule=fixed_lag", "schedule.lag=2", "schedule.steps=7", "checkpoint.every=1")
KEPT = ("checkpoint.keep=9", "logging.recorder.steps=9")
FAST = ("learner.lr=5e-3", "learner.lr_warmup_steps=0")


def learned(row):
    """A row without times, and without how much was asked for by then."""
    counted = ("ledger/", "buffer/")
    return {k: v for k, v in without_times(row).items() if not k.startswith(counted)}


def test_a_killed_run_takes_the_same_steps_and_each_can_be_replayed(command, small, tmp_path):
    """Slow: tests/learner/test_bounded_steps.py holds the state and the replay of ranks."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    words = ("train", *small, *LATE, *FAST, *KEPT)
    first = command(*words, f"run_dir={whole}")
    assert first.wait() == 0, first.text[-3000:]
    second = command(*words, f"run_dir={killed}")
    second.wait_for(lambda: len(rows(killed)) >= 3, what="three steps")
    second.kill()
    second.wait()
    third = command("train", f"run_dir={killed}", "resume=auto")
    assert third.wait() == 0, third.text[-3000:]
    assert "continuing from step_" in third.text
    # answers that were in flight are drawn again, in other batches of the engine: log-probs are as
    # equal as this machine's products are in any company
    near = 1e-3 if differ() else 0.0
    for row, again in zip(rows(whole), rows(killed), strict=True):
        assert learned(again) == pytest.approx(learned(row), rel=near, abs=near / 1e3, nan_ok=True)
    scales = [row["step_bound/scale"] for row in rows(killed)]
    assert len(scales) == 7 and min(scales[3:]) < 0.5 < sum(scales)
    step = min(range(4, 8), key=lambda n: scales[n - 1] or 1.0)  # the shortest that was taken
    again = command("replay", f"run_dir={killed}", "json=true", f"step={step}")
    assert again.wait() == 0, again.text[-3000:]
    text = again.text
    found = json.loads(text[text.index("\n{\n") if "\n{\n" in text else text.index("{\n") :])
    assert found["differing"] == []
    assert found["figures"]["step_bound/scale"]["again"] == scales[step - 1] < 1.0
