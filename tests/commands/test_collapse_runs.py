"""A policy that is lost for real, by steps too long for what is in flight, and each answer to it:
whole runs of real engines and ranks."""

import pytest

from rlcore.commands.collapsed import rollbacks
from rlcore.metrics.rows import read_rows

# Sorts 8 to 16 digits at three times the rate that eight steps in flight bear.
LOST = (
    "experiment=quickstart",
    "task.args.min_digits=8",
    "task.args.max_digits=16",
    "task.args.credit=digits",
    "model.max_len=48",
    "rollout.max_new_tokens=18",
    "schedule.groups_per_step=16",
    "rollout.samples_per_prompt=8",
    "schedule.max_staleness=8",
    "schedule.steps=24",
    "learner.lr=2e-4",
    "learner.lr_schedule=constant",
    "learner.lr_decay_steps=null",
    "learner.lr_final=0",
    "learner.lr_warmup_steps=3",
    "evaluation.every=8",
    "evaluation.prompts=64",
    "checkpoint.every=1",
    "cluster.object_store_mib=128",
    "logging.wandb=disabled",
    "learner.step_bound=null",
)
FALLS_BY = 20  # the latest step at which the fall was seen, with some to spare
pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.ranks, pytest.mark.timeout(1800)]


@pytest.fixture
def lost(warm_cache):
    """Words of a run that loses its policy, from one warmed-up model."""
    return (*LOST, f"model.warmup.cache_dir={warm_cache}")


def balanced(row):
    """The ledger of a row: every group that was admitted is in one account."""
    accounts = {name: row[f"ledger/{name}"] for name in ("consumed", "evicted", "failed", "live")}
    assert row["ledger/admitted"] == sum(accounts.values())
    return accounts


def finished(command, run_dir, *words):
    """(exit code, output in one line, rows) of a run."""
    run = command("train", *words, f"run_dir={run_dir}")
    code = run.wait(900)
    return code, " ".join(run.text.split()), read_rows(run_dir / "metrics.jsonl")


def test_a_policy_that_is_lost_is_held_and_the_run_can_be_resumed(command, lost, tmp_path):
    run_dir = tmp_path / "run"
    code, text, rows = finished(command, run_dir, *lost)
    assert code == 0, text[-3000:]
    assert [row["step"] for row in rows] == list(range(1, 25))
    assert "warning: samples are" in text and "(schedule.on_collapse=hold)" in text
    held = next(row for row in rows if row.get("ledger/evicted/collapsed"))
    assert held["step"] <= FALLS_BY + 1
    # nothing of before the hold is trained on: the next batches are no older than it
    assert held["staleness/max"] == 0 and all(balanced(row) for row in rows)
    assert rows[-1]["ledger/consumed"] == 16 * 24
    assert "Healthy" not in text and "warnings in 24 steps" in text
    code, text, more = finished(command, run_dir, "resume=auto", "schedule.steps=26")
    assert code == 0, text[-3000:]
    assert more[:24] == rows and balanced(more[-1])["consumed"] == 16 * 26


def test_a_policy_that_is_lost_goes_back_and_learns_on_at_half_the_rate(command, lost, tmp_path):
    run_dir = tmp_path / "run"
    words = (*lost, "schedule.on_collapse=rollback", "checkpoint.keep=1")
    code, text, rows = finished(command, run_dir, *words)
    back = rollbacks(run_dir)
    assert back and code in (0, 4), text[-3000:]
    assert "rollback 1 of schedule.max_rollbacks=3" in text
    assert 0 <= back[0].to < back[0].fell <= FALLS_BY and back[0].lr == 1e-4
    assert rows[-1]["lr"] <= back[-1].lr and balanced(rows[-1])
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))


def test_a_policy_that_is_lost_stops_the_run_and_its_sentence_goes_on(command, lost, tmp_path):
    run_dir = tmp_path / "run"
    code, text, _ = finished(command, run_dir, *lost, "schedule.on_collapse=stop")
    assert code == 4, text[-3000:]
    said, _, how = text.partition("to go on from there: rlcore train ")
    assert str(run_dir / "checkpoints" / "step_") in said.partition("last checkpoint before is ")[2]
    same, resume, slower = how.split()[:3]
    assert (same, resume) == (f"run_dir={run_dir}", "resume=auto")
    rate = float(slower.removeprefix("learner.lr="))
    code, text, rows = finished(command, run_dir, resume, slower)
    assert code == 0, text[-3000:]
    assert rate < 2e-4 and balanced(rows[-1])["consumed"] == 16 * 24
    assert rows[-1]["lr"] == pytest.approx(rate)
    # at that rate the policy is not lost
    assert rows[-1]["reward/mean"] > 0.8 * rows[0]["reward/mean"]
