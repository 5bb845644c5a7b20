"""Signals within five seconds of the first are one request to stop; a later one stops at once."""

import asyncio
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import left_over, rows

from rlcore.cli import main
from rlcore.commands.train import TOGETHER_S, StopSignals
from rlcore.errors import StageError


def test_signals_that_come_together_are_one_request():
    now = [100.0]
    stop = StopSignals(clock=lambda: now[0])
    assert not stop.requested
    assert not stop.repeated() and stop.requested
    for seconds in (0.0, 0.001, TOGETHER_S - 0.01):
        now[0] = 100.0 + seconds
        assert stop.repeated()
    now[0] = 100.0 + TOGETHER_S
    assert not stop.repeated()


def test_in_a_slurm_job_only_ctrl_c_stops_at_once(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    now = [0.0]
    stop = StopSignals(clock=lambda: now[0])
    assert not stop.repeated()
    now[0] = 60.0  # when the grace time of a preempted job ends
    assert stop.repeated(signal.SIGTERM) and stop.repeated(signal.SIGUSR1)
    assert not stop.repeated(signal.SIGINT)


def test_a_later_signal_stops_at_once():
    now, notes, asked = [0.0], [], []
    stop = StopSignals(clock=lambda: now[0])

    async def run():
        stop.listen(SimpleNamespace(request_stop=lambda: asked.append(True)), notes.append)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.01)
        now[0] = TOGETHER_S
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(10)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert asked == [True] and len(notes) == 1
    assert "press again later to stop now" in notes[0]


INTERRUPTED = """
import os, signal, sys, time
from rlcore.commands.train import StopSignals
StopSignals().interrupt()
first, second = (getattr(signal, name) for name in sys.argv[1:])
try:
    os.kill(os.getpid(), first)
    time.sleep(1)
except KeyboardInterrupt:
    os.kill(os.getpid(), second)  # as from timeout: before anything is taken down
    time.sleep(0.2)
    print("taken down")
"""


@pytest.mark.processes
@pytest.mark.parametrize("names", [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGTERM")], ids="-".join)
def test_what_is_taken_down_is_not_interrupted_by_the_same_request(names):
    command = [sys.executable, "-c", INTERRUPTED, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "taken down\n"), done.stderr


ENDLESS = ("schedule.steps=10000", "logging.console=plain", "evaluation.every=1000")


def _stopped_with_a_checkpoint(run, run_dir, family):
    """Exit code and checkpoint of a run that was asked to stop, and nothing left of it."""
    assert run.wait() == 130, run.text[-3000:]
    assert "finishing the current step" in run.text
    assert f"goes on with: rlcore train run_dir={run_dir} resume=auto" in run.text
    done = len(rows(run_dir))
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == [f"step_{done:06d}"]
    assert not left_over(family)


@pytest.mark.cluster
@pytest.mark.parametrize("wandb", ["disabled", pytest.param("offline", marks=pytest.mark.slow)])
def test_coreutils_timeout_leaves_a_checkpoint(installed, small, tmp_path, wandb):
    """It signals its child and then its group, in which all of them are."""
    run_dir = tmp_path / "run"
    words = (*small, *ENDLESS, f"logging.wandb={wandb}", f"run_dir={run_dir}")
    run = installed("train", *words, under=("timeout", "--preserve-status", "10000"))
    run.wait_for(lambda: len(rows(run_dir)) >= 3, what="three steps")
    family = run.descendants()
    run.process.send_signal(signal.SIGTERM)  # what timeout does when the time is over
    _stopped_with_a_checkpoint(run, run_dir, family)


@pytest.mark.slow
@pytest.mark.cluster
def test_two_signals_to_the_whole_group_leave_a_checkpoint(installed, small, tmp_path):
    run_dir = tmp_path / "run"
    run = installed("train", *small, *ENDLESS, f"run_dir={run_dir}")
    run.wait_for(lambda: len(rows(run_dir)) >= 3, what="three steps")
    family = run.descendants()
    for _ in range(2):  # the command is the leader of its group
        os.killpg(run.process.pid, signal.SIGTERM)
    _stopped_with_a_checkpoint(run, run_dir, family)


def test_a_run_that_fails_names_its_log_where_the_failure_is(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise StageError("the loss is nan.")

    monkeypatch.setattr("rlcore.commands.train._attempt", fail)
    monkeypatch.setattr(StopSignals, "interrupt", lambda self: None)  # no handlers in this process
    words = ["experiment=quickstart", "logging.wandb=disabled", "logging.console=off"]
    assert main(["train", *words, f"run_dir={tmp_path}"]) == 1
    log = tmp_path / "log.jsonl"
    ended = f"rlcore: the run ended: the loss is nan; {log} has the run's log\n"
    assert capsys.readouterr().err == ended
    assert "StageError: the loss is nan" in log.read_text()
