"""A lost policy: back to the checkpoint of before the alarm, by its command and for real."""

import json
import shlex
from dataclasses import asdict

import pytest

from rlcore.cli import main
from rlcore.commands.collapsed import Rollback, rollbacks, slowed
from rlcore.commands.train import StopSignals
from rlcore.errors import Collapsed
from rlcore.loop import checkpoint
from rlcore.loop.run_plan import Progress
from rlcore.metrics.rows import read_rows

WORDS = (
    "experiment=quickstart",
    "logging.wandb=disabled",
    "logging.console=off",
    "schedule.steps=9",
)


def make_checkpoint(root, step):
    with checkpoint.new_checkpoint(root, step) as folder:
        for part in checkpoint.PARTS:
            (folder / part).parent.mkdir(exist_ok=True)
            (folder / part).write_text("{}")
        state = {"progress": asdict(Progress(step=step)), "prompts": {"cursor": step}}
        (folder / checkpoint.STATE).write_text(json.dumps(state))


def row(step, far):
    return {
        "step": step,
        "lr": 1e-4,
        "reward/mean": 0.1 if far else 0.4,
        "mismatch/kl_k3": 0.3 if far else 0.0,
        "response_length/mean": 20.0,
        "staleness/mean": 2.0 if far else 0.0,
        "staleness/max": 3.0 if far else 0.0,
    }


class Attempts:
    """Attempts of a run whose policy is lost at step 6, with an alarm at step 4, in the first
    `lost` of them."""

    def __init__(self, monkeypatch, lost, checkpoints=(3, 5)):
        self.begun = []  # (step, learner.lr) of each
        self._lost = lost
        self._checkpoints = checkpoints
        monkeypatch.setattr("rlcore.commands.train._attempt", self)
        monkeypatch.setattr(StopSignals, "interrupt", lambda self: None)

    def __call__(self, run, start, patience_s):
        step = start.progress.step
        self.begun.append((step, slowed(run.config).learner.lr))
        if len(self.begun) > self._lost:
            return Progress(step=run.config.schedule.steps)
        for at in range(step + 1, 7):
            run.logger.log(row(at, at >= 3))
        for at in self._checkpoints:
            make_checkpoint(run.checkpoints, at)
        raise Collapsed(6, 4)


def train(folder, *words):
    return main(["train", *WORDS, f"run_dir={folder}", *words])


def test_rollback_goes_on_before_the_alarm_with_half_the_rate(tmp_path, monkeypatch):
    attempts = Attempts(monkeypatch, lost=2)
    assert train(tmp_path, "schedule.on_collapse=rollback") == 0
    assert attempts.begun == [(0, 1e-4), (3, 5e-5), (3, 2.5e-5)]
    assert rollbacks(tmp_path) == [Rollback(6, 3, 5e-5, 1e-4), Rollback(6, 3, 2.5e-5, 1e-4)]
    # the words of before go on with the lower rate, another rate holds
    for words, rate in (((), 2.5e-5), (("learner.lr=3e-5",), 3e-5)):
        assert train(tmp_path, "schedule.on_collapse=rollback", "resume=auto", *words) == 0
        assert attempts.begun[-1] == (3, rate)
    assert [r["step"] for r in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    log = (tmp_path / "log.jsonl").read_text()
    assert "rollback 2 of schedule.max_rollbacks=3, to step_000003, with learner.lr=2.5e-05" in log
    assert [f.name for f in (tmp_path / "checkpoints").glob("step_*")] == ["step_000003"]


def test_without_a_checkpoint_of_before_the_run_begins_anew(tmp_path, monkeypatch):
    attempts = Attempts(monkeypatch, lost=1, checkpoints=(5,))
    assert train(tmp_path, "schedule.on_collapse=rollback") == 0
    assert attempts.begun == [(0, 1e-4), (0, 5e-5)]
    assert "the beginning, since there was no checkpoint" in (tmp_path / "log.jsonl").read_text()


@pytest.mark.parametrize("checkpoints", [(3, 5), ()])
def test_stop_says_how_to_go_on_and_that_goes_on(tmp_path, monkeypatch, capsys, checkpoints):
    tmp_path = tmp_path / "a run"
    attempts = Attempts(monkeypatch, lost=1, checkpoints=checkpoints)
    assert train(tmp_path, "schedule.on_collapse=stop") == 4
    said = capsys.readouterr().err
    assert "the policy fell by step 6 (reward/mean 0.1 to 0.1)" in said
    assert "the first alarm was at step 4 (schedule.on_collapse=stop)" in said
    before = tmp_path / "checkpoints" / "step_000003"
    last = f"Its last checkpoint before is {before}" if checkpoints else "It has no checkpoint"
    assert last in said
    command = said.partition("to go on from there: rlcore ")[2].strip()
    # 6 nats after two steps of 1e-4, so 0.5 after two of 2.89e-5: its samples are one step old
    assert command == f"train run_dir={shlex.quote(str(tmp_path))} resume=auto learner.lr=2.8e-05"
    assert main(shlex.split(command)) == 0
    assert attempts.begun[1] == (3 if checkpoints else 0, 2.8e-5)


def test_the_rate_that_would_have_held_is_for_samples_as_old_as_the_schedule_lets_them_be(
    tmp_path, monkeypatch, capsys
):
    Attempts(monkeypatch, lost=1)
    late = ("schedule.on_collapse=stop", "schedule=async", "schedule.max_staleness=8")
    assert train(tmp_path, *late) == 4
    assert capsys.readouterr().err.strip().endswith("learner.lr=6.4e-06")


def test_rollbacks_are_used_up_also_over_several_commands(tmp_path, monkeypatch, capsys):
    words = ("schedule.on_collapse=rollback", "schedule.max_rollbacks=2")
    attempts = Attempts(monkeypatch, lost=9)
    assert train(tmp_path, *words) == 4
    assert len(attempts.begun) == 3 and "after 2 rollbacks" in capsys.readouterr().err
    assert train(tmp_path, *words, "resume=auto") == 4
    assert len(attempts.begun) == 4 and len(rollbacks(tmp_path)) == 2


# A policy that is lost for real, by steps too long for what is in flight, and each answer to it:
# whole runs of real engines and ranks.


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


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.timeout(1800)
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


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.timeout(1800)
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


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.timeout(1800)
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
