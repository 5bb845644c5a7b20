"""Runs with phases of two batches and two epochs: stopped within a phase, and continued."""

import signal

import pytest
from conftest import rows, without_times

pytestmark = [pytest.mark.engine, pytest.mark.ranks]
PHASES = (
    "schedule.steps_per_phase=2",
    "schedule.epochs=2",
    "evaluation.every=0",
    "evaluation.at_start=false",
    # steps long enough for a ratio to leave the clip
    "learner.lr=1e-3",
    "learner.lr_warmup_steps=0",
    "algorithm.eps_low=0.05",
    "algorithm.eps_high=0.05",
)


def clipped(row):
    return row["policy/clip_low_share"] + row["policy/clip_high_share"]


def audit(found):
    """Every group was used twice, within the staleness bound, and clipped in its second epoch."""
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    last = found[-1]
    assert last["ledger/consumed"] == len(found) // 2 * 8 == last["ledger/admitted"]
    assert max(row["staleness/max"] for row in found) <= 4 - 1 + 2
    for row in found:
        first = (row["step"] - 1) % 4 == 0
        assert (row["policy/ratio"] == pytest.approx(1.0, abs=1e-6)) == first, row["step"]
        assert not first or clipped(row) == 0.0
    assert max(map(clipped, found)) > 0.0


@pytest.mark.slow
def test_an_asynchronous_run_uses_every_group_twice(command, small, tmp_path):
    run_dir = tmp_path / "run"
    words = (*small, *PHASES, "schedule.max_staleness=2", "schedule.steps=12")
    run = command("train", *words, f"run_dir={run_dir}")
    assert run.wait() == 0, run.text[-3000:]
    audit(rows(run_dir))
    assert "never binds" not in run.text


@pytest.mark.slow
def test_an_asynchronous_run_stopped_within_a_phase_uses_every_group_twice(
    command, small, tmp_path
):
    words = ("train", *small, *PHASES, "schedule.max_staleness=2")
    for attempt in range(3):
        run_dir = tmp_path / f"run{attempt}"
        run = command(*words, f"run_dir={run_dir}", "schedule.steps=10000")
        run.wait_for(lambda at=run_dir: len(rows(at)) >= 5, what="five steps", every_s=0.02)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.text[-3000:]
        done = len(rows(run_dir))
        if done % 4:
            break
    assert done % 4, "no stop came within a phase"
    assert rows(run_dir)[-1]["ledger/consumed"] == 8 * (2 * (done // 4) + max(0, done % 4 - 2))
    steps = done - done % 4 + 8
    resumed = command("train", f"run_dir={run_dir}", "resume=auto", f"schedule.steps={steps}")
    assert resumed.wait() == 0, resumed.text[-3000:]
    assert len(rows(run_dir)) == steps
    audit(rows(run_dir))


@pytest.mark.slow
def test_a_synchronous_run_continues_within_a_phase_to_the_bit(command, small, tmp_path):
    words = ("train", *small, "schedule=on_policy", "schedule.on_publish=finish", *PHASES)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    first = command(*words, f"run_dir={whole}", "schedule.steps=8")
    assert first.wait() == 0, first.text[-3000:]
    second = command(*words, f"run_dir={parts}", "schedule.steps=5")
    assert second.wait() == 0, second.text[-3000:]
    third = command("train", f"run_dir={parts}", "resume=auto", "schedule.steps=8")
    assert third.wait() == 0, third.text[-3000:]
    # the last row of the stopped run reports its final publish and evaluation too
    resumed, uninterrupted = (
        [without_times(row) for i, row in enumerate(rows(run_dir)) if i != 4]
        for run_dir in (parts, whole)
    )
    assert resumed == uninterrupted
    assert [row["staleness/max"] for row in rows(whole)] == [0, 1, 2, 3] * 2
    assert all(row["grad_norm"] > 0 for row in rows(whole))
