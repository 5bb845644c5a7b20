"""`rlcore sweep`: every combination once, continued where it ended, reported over all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from timing import deadline

from rlcore.cli import main
from rlcore.commands.sweep import jobs, on_cpus_here, sweep
from rlcore.config.compose import load
from rlcore.errors import UserError

WORDS = ["experiment=quickstart", "schedule.steps=3", "run_dir=s"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def names(*words):
    return [job.name for job in jobs([*WORDS, *words])]


def ended(folder, step=3, phase="ended"):
    """What a run of three steps leaves."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "status.json").write_text(json.dumps({"phase": phase, "step": step}))
    rows = [json.dumps({"step": n, "reward/mean": 0.5}) for n in range(1, step + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")


class Starts:
    """Stands in for a run's process: notes the run, leaves its files, and returns its code."""

    def __init__(self, codes=()):
        self.codes = list(codes)
        self.runs = []

    def __call__(self, command):
        assert command[:2] == ("rlcore", "train") and "resume=auto" in command
        folder = Path(next(w[len("run_dir=") :] for w in command if w.startswith("run_dir=")))
        self.runs.append(folder.name)
        code = self.codes.pop(0) if self.codes else 0
        ended(folder, *((1, "failed") if code == 1 else (1,) if code else ()))
        return code


def test_every_combination_has_a_folder_of_its_own():
    assert names("seed=range(2)") == ["seed-0", "seed-1"]
    assert names("seed=0,1", "learner.lr=1e-4,1e-3") == [
        "seed-0_learner.lr-0.0001",
        "seed-0_learner.lr-0.001",
        "seed-1_learner.lr-0.0001",
        "seed-1_learner.lr-0.001",
    ]
    first, second = jobs([*WORDS, "correction=[tis],[dvp,mis]"])
    assert second.config.correction.names == ("dvp", "mis") and first.folder != second.folder
    assert first.config.schedule.steps == 3 and first.folder.parent == Path("s").resolve()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (WORDS, "name one run"),
        (["seed=0,1"], "run_dir= is missing"),
        ([*WORDS, "seed=0,0"], "Two runs of the sweep are seed-0"),
        ([*WORDS, "learner.lr=1,-1"], "learner.lr=-1"),
        ([*WORDS, "task=digits,nosuch"], "nosuch"),
    ],
)
def test_what_makes_no_sweep_is_refused_before_anything_starts(words, said, capsys):
    with pytest.raises(UserError, match=said):
        jobs(words)
    assert main(["sweep", *words]) == 2 and not list(Path().iterdir())


def test_runs_are_done_one_after_another_and_reported(capsys):
    starts = Starts()
    assert sweep(jobs([*WORDS, "seed=0,1,2"]), None, dry_run=False, start=starts) == 0
    assert starts.runs == ["seed-0", "seed-1", "seed-2"]
    assert "seed-2: finished" in capsys.readouterr().out
    assert "seed-1" in Path("s/report.html").read_text()


def test_a_failed_run_does_not_end_the_sweep_and_is_done_again(capsys):
    starts = Starts([0, 1, 0])
    assert sweep(jobs([*WORDS, "seed=0,1,2"]), None, dry_run=False, start=starts) == 1
    assert starts.runs == ["seed-0", "seed-1", "seed-2"]
    assert "seed-1: failed" in capsys.readouterr().out
    again = Starts()
    assert sweep(jobs([*WORDS, "seed=0,1,2,3"]), None, dry_run=False, start=again) == 0
    assert again.runs == ["seed-1", "seed-3"]


def test_a_run_that_was_to_be_longer_is_continued():
    ended(Path("s/seed-0"), step=2)
    starts = Starts()
    assert sweep(jobs([*WORDS, "seed=0,1"]), None, dry_run=False, start=starts) == 0
    assert starts.runs == ["seed-0", "seed-1"]


def test_a_stopped_run_stops_the_sweep():
    starts = Starts([130])
    assert sweep(jobs([*WORDS, "seed=0,1"]), None, dry_run=False, start=starts) == 130
    assert starts.runs == ["seed-0"]


def test_a_dry_run_lists_what_would_be_done(capsys):
    ended(Path("s/seed-1"))
    assert main(["sweep", *WORDS, "seed=0,1", "dry_run=true"]) == 0
    shown = capsys.readouterr().out
    assert "seed-0: rlcore train" in shown and "seed-1: finished" in shown
    assert not Path("s/seed-0").exists()


@pytest.mark.parametrize(
    ("words", "forks"),
    [
        ([], True),
        (["actor.bf16.num_gpus=1"], False),
        (["cluster=slurm"], False),
        (["cluster.address=h:6379"], False),
    ],
)
def test_runs_on_this_machine_s_cpus_may_be_forks(words, forks):
    assert on_cpus_here(load([*WORDS, *words])) == forks


def test_schedulers_get_each_run_once(monkeypatch, capsys):
    sent = []

    def submitted(config, words, *, dry_run):
        sent.append(Path(config.run_dir).name)
        return 0

    monkeypatch.setattr("rlcore.commands.sweep.launch", submitted)
    words = [*WORDS, "seed=0,1", "cluster=slurm"]
    assert main(["sweep", *words]) == 0 and sent == ["seed-0", "seed-1"]
    assert main(["sweep", *words]) == 0 and sent == ["seed-0", "seed-1"]
    assert "was submitted before" in capsys.readouterr().out
    ended(Path("s/seed-0"))
    ended(Path("s/seed-1"), step=1, phase="failed")
    assert main(["sweep", *words]) == 0 and sent == ["seed-0", "seed-1", "seed-1"]
    assert Path("s/report.html").exists()


@pytest.mark.processes
def test_output_that_nobody_reads_any_more_ends_quietly():
    command = f"{sys.executable} -m rlcore.cli train --help | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=deadline(120)
    )
    assert done.stdout.startswith("rlcore train: ") and done.stdout.endswith("\n0\n")
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.cluster
def test_a_sweep_of_two_real_runs():
    small = ["schedule.groups_per_step=4", "evaluation.prompts=8", "model.warmup.steps=5"]
    words = [*WORDS, *small, "seed=0,1", "logging.console=plain"]
    assert main(["sweep", *words]) == 0
    rows = [Path(f"s/seed-{n}/metrics.jsonl").read_text().splitlines() for n in (0, 1)]
    assert [len(r) for r in rows] == [4, 4] or [len(r) for r in rows] == [3, 3]
    assert Path("s/report.html").exists() and main(["sweep", *words]) == 0
