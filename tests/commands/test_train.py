"""Whole runs: the outside contract, exact resume, a killed actor, and signals that stop a run."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import growth
import pytest
import yaml
from conftest import left_over, modes, rows, umask, without_times

from rlcore.cli import main
from rlcore.cluster.cpu.kernels import KERNELS
from rlcore.commands.train import TOGETHER_S, StopSignals
from rlcore.cores import cores
from rlcore.errors import StageError
from rlcore.metrics.log import read_log

INJECTION = Path(__file__).resolve().parents[2] / "benchmarks" / "faults" / "fault_injection"

CONTRACT = [
    "step",
    "policy_version",
    "reward/mean",
    "response_length/mean",
    "staleness/mean",
    "staleness/max",
    "mismatch/kl_k1",
    "mismatch/kl_k3",
    "mismatch/abs_dlogp_mean",
    "mismatch/ess",
    "loss/policy",
    "grad_norm",
    "entropy",
    "time/step_s",
    "time/wait_data_s",
    "time/publish_s",
    "throughput/rollout_tokens_per_s",
    "throughput/train_tokens_per_s",
    "buffer/groups",
]


@pytest.mark.engine
@pytest.mark.ranks
def test_an_asynchronous_run_leaves_what_the_contract_names(command, small, tmp_path):
    run_dir, cache = tmp_path / "run", tmp_path / "warm"
    words = ["schedule.steps=5", "schedule.max_staleness=2", "logging.wandb=offline"]
    with umask(0o027):
        run = command(
            "train", *small, f"run_dir={run_dir}", *words, f"model.warmup.cache_dir={cache}"
        )
    seen = []
    run.wait_for(
        lambda: bool(seen.extend(run.descendants())) or len(rows(run_dir)) >= 2, what="two steps"
    )
    assert run.wait() == 0, run.text[-3000:]
    found = rows(run_dir)
    assert [r["step"] for r in found] == [1, 2, 3, 4, 5]
    for row in found:
        assert not [k for k in CONTRACT if k not in row]
        assert any(k.startswith("correction/") for k in row) and any(
            k.startswith("ledger/") for k in row
        )
        assert row["staleness/max"] <= 2
        assert row["mismatch/ess"] > 0.5
    brief = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    columns = {key for row in brief for key in row if not key.startswith("eval/")}
    assert len(columns) <= json.loads(growth.BOUNDS.read_text())[growth.COLUMNS], sorted(columns)
    assert any("eval/digits/greedy" in r for r in found) and "eval/digits/greedy" in found[-1]
    assert found[-1]["eval/policy_version"] == 5
    last = found[-1]
    assert last["ledger/consumed"] == 5 * 8
    assert (
        last["ledger/admitted"]
        == last["ledger/consumed"]
        + last["ledger/live"]
        + last["ledger/failed"]
        + last["ledger/evicted"]
    )
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["schedule"]["steps"] == 5
    assert "<html" in (run_dir / "report.html").read_text().lower()
    assert list((run_dir / "samples").glob("*.jsonl")) and list(
        (run_dir / "wandb").glob("offline-run-*")
    )
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["step_000005"]
    assert list(cache.rglob("model.safetensors"))
    assert modes(cache, run_dir / "checkpoints", run_dir / "samples") == {0o640}
    assert not left_over(seen)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.ranks
def test_a_stopped_and_resumed_synchronous_run_equals_one_that_was_not(command, small, tmp_path):
    words = ("train", *small, "schedule=on_policy", "schedule.on_publish=finish")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    first = command(*words, f"run_dir={whole}", "schedule.steps=6")
    assert first.wait() == 0, first.text[-3000:]
    second = command(*words, f"run_dir={parts}", "schedule.steps=4")
    assert second.wait() == 0, second.text[-3000:]
    third = command("train", f"run_dir={parts}", "resume=auto", "schedule.steps=6")
    assert third.wait() == 0, third.text[-3000:]
    assert [r["step"] for r in rows(parts)] == list(range(1, 7))
    assert [without_times(r) for r in rows(parts)] == [without_times(r) for r in rows(whole)]
    assert all(r["grad_norm"] > 0 for r in rows(whole))


@pytest.mark.slow
@pytest.mark.cluster
def test_a_run_gives_the_numbers_with_ray_that_it_gives_without(
    installed, command, small, tmp_path, monkeypatch
):
    """What the runs by `command` show holds for those that users start. What a role writes to its
    standard error is in the run's log."""
    monkeypatch.setenv("PYTHONPATH", f"{INJECTION}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("RLCORE_FAULT", "talking_roles")
    words = ("train", *small, "schedule=on_policy", "schedule.on_publish=finish")
    found = []
    for start in (installed, command):
        run_dir = tmp_path / str(len(found))
        run = start(*words, "schedule.steps=4", f"run_dir={run_dir}")
        assert run.wait() == 0, run.text[-3000:]
        found.append([without_times(row) for row in rows(run_dir)])
    assert found[0] == found[1]
    assert len(found[0]) == 4 and all(row["grad_norm"] > 0 for row in found[0])
    said = {
        (entry["role"].split()[0], line)
        for entry in read_log(tmp_path / "0")[0]
        for line in entry["text"].splitlines()
        if entry["event"] == "stderr" and line.endswith(" is here")
    }
    roles = ("BufferActor", "LearnerActor", "RolloutActor", "ScorerActor")
    assert said == {(role, f"{role} is here") for role in roles}


@pytest.fixture(scope="module")
def large_batch(small):
    """Words of runs with phases of three steps."""
    return (
        "train",
        *small,
        "schedule=large_batch",
        "schedule.steps_per_publish=3",
        "evaluation.every=5",
        "correction=[jackpot]",
        "correction.jackpot.target=new",
        "algorithm.dynamic_sampling=true",
    )


@pytest.fixture(scope="module")
def whole_large_batch(large_batch, finished, tmp_path_factory):
    """The rows of two phases without a stop."""
    run_dir = tmp_path_factory.mktemp("large_batch") / "whole"
    finished(*large_batch, f"run_dir={run_dir}", "schedule.steps=6")
    return rows(run_dir)


@pytest.mark.engine
@pytest.mark.ranks
def test_a_large_batch_run_resumes_exactly_also_in_the_middle_of_a_phase(
    command, large_batch, whole_large_batch, tmp_path
):
    run_dir, uninterrupted = tmp_path / "run", whole_large_batch
    first = command(*large_batch, f"run_dir={run_dir}", "schedule.steps=4")
    assert first.wait() == 0, first.text[-3000:]
    # as a scheduler repeats a command
    second = command(*large_batch, f"run_dir={run_dir}", "resume=auto", "schedule.steps=6")
    assert second.wait() == 0, second.text[-3000:]
    resumed = rows(run_dir)
    # the last row of the stopped run reports its final publish and evaluation too
    assert [without_times(r) for i, r in enumerate(resumed) if i != 3] == [
        without_times(r) for i, r in enumerate(uninterrupted) if i != 3
    ]
    assert [r["staleness/max"] for r in uninterrupted] == [0, 1, 2, 0, 1, 2]
    assert all(r["grad_norm"] > 0 for r in uninterrupted)
    assert any("eval/digits/greedy" in r for r in resumed[4:5])
    # what rounds sums is stated, and the same in the second part
    threads = yaml.safe_load((run_dir / "config.yaml").read_text())["learner"]["max_threads"]
    most = min(cores(), int(os.environ.get("OMP_NUM_THREADS", cores())))
    assert threads == (most if most > 1 else None)
    said = [e["text"] for e in read_log(run_dir)[0] if "matrix kernels" in str(e.get("text"))]
    assert len(said) == 2 and not [e for e in read_log(run_dir)[0] if "not an exact" in str(e)]
    about = json.loads((run_dir / "about.json").read_text())
    assert about["kernels"]["chosen"] == os.environ.get(KERNELS, about["kernels"]["chosen"])


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.ranks
def test_a_large_batch_run_that_is_interrupted_in_the_middle_of_a_phase_resumes_exactly(
    command, large_batch, whole_large_batch, tmp_path
):
    # The phase takes half a second, and a stop that comes after it proves nothing.
    for attempt in range(3):
        stopped = tmp_path / f"stopped{attempt}"
        first = command(*large_batch, f"run_dir={stopped}", "schedule.steps=6")
        begun = stopped / "samples" / "step_000001.jsonl"  # written before p_ref's passes
        first.wait_for(begun.exists, what="the first phase to begin", every_s=0.005)
        first.process.send_signal(signal.SIGINT)
        assert first.wait() == 130, first.text[-3000:]
        if len(rows(stopped)) in (1, 2):
            break
    assert len(rows(stopped)) in (1, 2), "no stop came in the middle of a phase"
    second = command("train", f"run_dir={stopped}", "resume=auto")
    assert second.wait() == 0, second.text[-3000:]
    assert [without_times(r) for r in rows(stopped)] == [
        without_times(r) for r in whole_large_batch
    ]


@pytest.mark.slow
@pytest.mark.cluster
def test_interrupts_of_the_whole_group_leave_a_checkpoint_and_no_process(
    installed, small, tmp_path
):
    """Ctrl-C in a terminal, pressed twice; the service of wandb is in the group, too."""
    run_dir = tmp_path / "run"
    words = (*small, f"run_dir={run_dir}", "logging.wandb=offline")
    run = installed("train", *words, "schedule.steps=10000")
    run.wait_for(lambda: len(rows(run_dir)) >= 3, what="three steps")
    family = run.descendants()
    for _ in range(2):  # the command is the leader of its group
        os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait() == 130, run.text[-3000:]
    assert "finishing the current step" in run.text
    assert not left_over(family)
    done = len(rows(run_dir))
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == [f"step_{done:06d}"]
    resumed = installed("train", f"run_dir={run_dir}", "resume=auto", f"schedule.steps={done + 2}")
    assert resumed.wait() == 0, resumed.text[-3000:]
    found = rows(run_dir)
    assert [r["step"] for r in found] == list(range(1, done + 3))
    assert found[-1]["ledger/consumed"] == (done + 2) * 8
    assert max(r["staleness/max"] for r in found) <= 1


@pytest.mark.slow
@pytest.mark.cluster
def test_a_killed_rollout_actor_is_replaced_and_nothing_is_lost(installed, small, tmp_path):
    run_dir = tmp_path / "run"
    run = installed(
        "train", *small, f"run_dir={run_dir}", "schedule.steps=30", "cluster.heartbeat_s=1"
    )
    run.wait_for(lambda: len(rows(run_dir)) >= 3, what="three steps")
    victims = [p for p in run.descendants() if "RolloutActor" in " ".join(p.cmdline())]
    assert len(victims) == 1
    victims[0].kill()
    assert run.wait() == 0, run.text[-3000:]
    found = rows(run_dir)
    assert [r["step"] for r in found] == list(range(1, 31))
    last = found[-1]
    assert last["rollout/replacements"] == 1
    assert (
        last["ledger/consumed"] == 30 * 8
        and last["ledger/failed"] == 0
        and last["ledger/evicted"] == 0
    )


# Signals within five seconds of the first are one request to stop; a later one stops at once.


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
