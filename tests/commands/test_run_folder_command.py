"""The run folder: where a command names none, its one owner, and what it says of the machine."""

import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rlcore.cli import main
from rlcore.cluster.cpu.kernels import KERNELS, Kernels
from rlcore.commands import owner as module
from rlcore.commands.about import about, kernel_news, limit_facts, run_kernels, write_about
from rlcore.commands.owner import LOCK, living_owner, own
from rlcore.config.compose import load, to_yaml
from rlcore.errors import OwnershipLost, UserError


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Makes runs under runs/ of the working directory, each newer than the one before."""
    monkeypatch.chdir(tmp_path)
    made = []

    def make(name):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        file = folder / "config.yaml"
        file.write_text(to_yaml(load([f"run_dir={folder}", "logging.wandb=disabled"])))
        made.append(folder)
        os.utime(file, (len(made), len(made)))
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.25}) + "\n")
        return folder

    return make


def test_scale_report_and_watch_take_the_newest_run_and_say_so(runs, capsys):
    runs("old")
    newest = runs("sweep/seed-1")
    for words, code in ((["scale", "actor.bf16.count=2"], 2), (["report"], 0)):
        assert main(words) == code
        said = capsys.readouterr().err
        assert "run_dir=runs/sweep/seed-1 (the newest run)" in said
        assert ("no run is going on there" in said) == (code == 2)
    assert main(["watch", "once=true"]) == 0
    assert "run_dir=runs/sweep/seed-1 (the newest run)" in capsys.readouterr().err
    assert (newest / "report.html").is_file()
    older = runs("named").parent / "old"
    assert main(["scale", f"run_dir={older}", "actor.bf16.count=3"]) == 2
    said = capsys.readouterr().err
    assert "newest" not in said and f"run_dir={older}" in said


@pytest.mark.parametrize("words", [["eval"], ["export", "out=there"]])
def test_eval_and_export_take_the_newest_run(runs, words, capsys):
    runs("old")
    newest = runs("new")
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"run_dir={newest} holds no valid checkpoint" in said and "(the newest run)" in said


def test_a_checkpoint_names_its_run(runs, capsys):
    checkpoint = runs("old") / "checkpoints" / "step_1"
    runs("new")
    assert main(["eval", f"checkpoint={checkpoint}"]) == 2
    said = capsys.readouterr().err
    assert "runs/old (of the checkpoint)" in said and "new" not in said


@pytest.mark.parametrize("verb", ["eval", "watch", "report", "scale"])
def test_without_a_run_the_key_is_asked_for(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([verb, *(["actor.bf16.count=1"] if verb == "scale" else [])]) == 2
    assert f"runs/ holds no run for rlcore {verb}" in capsys.readouterr().err


def test_a_new_run_is_named_by_its_experiment_and_the_time(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "experiment=quickstart", "dry_run=true"]) == 0
    shown = capsys.readouterr()
    folder = re.search(r"run_dir=(runs/quickstart-\d{8}-\d{6})\n", shown.err).group(1)
    assert f"{tmp_path}/{folder}/config.yaml" in shown.out and not (tmp_path / "runs").exists()
    assert main(["train", "experiment=quickstart", "resume=auto"]) == 2
    assert "run_dir= is missing: resume=auto" in capsys.readouterr().err
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.yaml").write_text(
        "defaults: [{model: tiny}, {task: digits}, {actor: [bf16]}, _self_]\nrun_dir: mine\n"
    )
    assert main(["train", f"config_dir={own}", "dry_run=true"]) == 0
    assert f"{tmp_path}/mine/config.yaml" in capsys.readouterr().out


# One owner a run folder.


OWNS = """
import sys
from pathlib import Path
from rlcore.commands.owner import own
owner = own(Path(sys.argv[1]), "rlcore train")
print(owner.news or "owns", flush=True)
sys.stdin.read()
owner.release()
"""


def _files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _elsewhere(folder, age_s, **changed):
    """A lock as a process of another host leaves it."""
    folder.mkdir(exist_ok=True)
    lock = {
        "id": "5f0c",
        "command": "rlcore train",
        "host": "node-7",
        "boot": "b",
        "pids": "pid:[1]",
        "pid": 42,
        "started": 7,
    }
    (folder / LOCK).write_text(json.dumps(lock | changed))
    then = (folder / LOCK).stat().st_mtime - age_s
    os.utime(folder / LOCK, (then, then))


@pytest.fixture
def another(tmp_path):
    """Start processes that own a folder."""
    started = []

    def start(folder=tmp_path):
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", OWNS, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1], started[-1].stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.processes
def test_a_living_owner_keeps_the_folder_and_a_killed_one_is_replaced_at_once(tmp_path, another):
    process, said = another()
    assert said == "owns"
    before = _files(tmp_path)
    with pytest.raises(UserError, match=f"in use by rlcore train .process {process.pid} on this"):
        own(tmp_path, "rlcore train", takeover_after_s=60)
    assert _files(tmp_path) == before
    assert living_owner(tmp_path).pid == process.pid
    process.send_signal(signal.SIGSTOP)  # it may go on at any time
    with pytest.raises(UserError, match="in use by"):
        own(tmp_path, "rlcore eval")
    process.kill()
    process.wait(30)
    assert living_owner(tmp_path) is None
    with own(tmp_path, "rlcore eval") as owner:
        assert f"process {process.pid} on this host), is dead" in owner.news
    assert _files(tmp_path) == {}


@pytest.mark.processes
def test_of_several_commands_that_find_a_dead_owner_one_takes_its_place(tmp_path, another):
    process, _ = another()
    process.kill()
    process.wait(30)
    code = OWNS.replace("owner = own", "import time\nowner = own")
    rivals = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    # The owner lasts until its input ends, so the others have ended before it does.
    losers = []
    while len(losers) < 3:
        losers = [rival for rival in rivals if rival.poll() is not None]
    (winner,) = [rival for rival in rivals if rival not in losers]
    assert "is dead" in winner.communicate("")[0]
    for loser in losers:
        assert "in use by rlcore train" in loser.communicate()[1]
    assert _files(tmp_path) == {}


def test_a_process_id_that_was_given_again_is_not_the_owner(tmp_path):
    with own(tmp_path, "rlcore train"):
        lock = json.loads((tmp_path / LOCK).read_text())
    (tmp_path / LOCK).write_text(json.dumps(lock | {"started": lock["started"] - 1}))
    with own(tmp_path, "rlcore train") as owner:
        assert "is dead" in owner.news


@pytest.mark.parametrize("content", ["", "[]", "{", '{"id": "a"}'])
def test_a_lock_that_cannot_be_read_is_somebody_s(tmp_path, content):
    (tmp_path / LOCK).write_text(content)
    with pytest.raises(UserError, match="in use by an unknown command"):
        own(tmp_path, "rlcore train")


def test_an_owner_on_another_host_is_replaced_by_its_age_and_with_the_key_alone(tmp_path):
    _elsewhere(tmp_path, 5)
    with pytest.raises(UserError, match=r"in use by rlcore train .process 42 on host node-7"):
        own(tmp_path, "rlcore train", takeover_after_s=60)
    _elsewhere(tmp_path, 300)
    assert living_owner(tmp_path) is None
    for key in (None, 600):
        before = _files(tmp_path)
        with pytest.raises(UserError, match=r"has not renewed.*takeover_after_s=60"):
            own(tmp_path, "rlcore train", takeover_after_s=key)
        assert _files(tmp_path) == before
    with own(tmp_path, "rlcore train", takeover_after_s=60, watch_s=0.01) as owner:
        assert "taken over from rlcore train (process 42 on host node-7), silent for" in owner.news


def test_an_owner_that_renews_while_it_is_watched_keeps_the_folder(tmp_path, monkeypatch):
    """As one whose clock jumped."""
    _elsewhere(tmp_path, 300)
    monkeypatch.setattr(module.time, "sleep", lambda _: os.utime(tmp_path / LOCK))
    with pytest.raises(UserError, match="in use by"):
        own(tmp_path, "rlcore train", takeover_after_s=60)


def test_the_lock_of_a_host_that_was_booted_again_is_nobody_s(tmp_path):
    _elsewhere(tmp_path, 300, host=module.socket.gethostname())
    with own(tmp_path, "rlcore train") as owner:
        assert "is dead" in owner.news


def test_an_owner_learns_that_it_lost_the_folder_and_leaves_it_to_the_other(tmp_path):
    owner = own(tmp_path, "rlcore train")
    owner.require()
    (tmp_path / LOCK).unlink()  # as a user who tidies up
    owner.require()
    assert living_owner(tmp_path).pid == os.getpid()
    _elsewhere(tmp_path / "other", 0)
    (tmp_path / "other" / LOCK).replace(tmp_path / LOCK)
    with pytest.raises(OwnershipLost, match=r"taken over by rlcore train .process 42"):
        owner.require()
    owner.release()
    assert (tmp_path / LOCK).exists()


@pytest.mark.parametrize(
    "command",
    [
        "train experiment=quickstart",
        "train experiment=quickstart resume=auto",
        "sft experiment=quickstart",
        "eval experiment=quickstart model.path={model}",
        "report {run}",
        "sweep experiment=quickstart seed=0,1",
    ],
)
def test_no_command_writes_to_a_folder_of_another(tmp_path, command, capsys, monkeypatch):
    """Refused with exit code 2, and nothing in the folder is touched."""
    monkeypatch.setattr("rlcore.commands.evaluate.to_evaluate", lambda *_: ("m", None))
    for name in ("check_attention", "ask_lean_servers"):
        monkeypatch.setattr(f"rlcore.commands.evaluate.{name}", lambda _: None)
    monkeypatch.setattr(
        "rlcore.commands.evaluate.prepare", lambda config, trains: SimpleNamespace(config=config)
    )
    run = tmp_path / "run"
    words = command.format(run=run, model=tmp_path).split()
    with own(run, "rlcore train"):
        (run / "config.yaml").write_text("seed: 0\n") if words[0] == "report" else None
        before = _files(run)
        folder = [] if words[0] == "report" else [f"run_dir={run}"]
        assert main([*words, *folder]) == 2
        said = capsys.readouterr().err
        assert f"run_dir={run} is in use by rlcore train" in said
        assert ("out=FILE" in said) == (words[0] == "report")
        assert _files(run) == before


# What a run notes about the machine and the source that it is done with.


def test_it_has_machine_and_versions_and_nothing_private(tmp_path):
    kernels = Kernels("AVX512", "tried", {"": 71.0, "AVX512": 97.0})
    limit = {"gflops": 194.0}
    write_about(tmp_path, kernels, limit)
    found = json.loads((tmp_path / "about.json").read_text())
    assert found == about(kernels, limit)
    assert found["limit"] == limit and about()["limit"] is None
    assert found["kernels"] == {"chosen": "AVX512", "gflops": 97.0}
    assert found["machine"]["cores"] >= 1 and found["machine"]["memory_gib"] > 0
    assert {"python", "torch", "ray"} <= set(found["versions"])
    text = json.dumps(found)
    assert socket.gethostname() not in text and str(tmp_path) not in text
    assert f'"{getpass.getuser()}"' not in text


@pytest.fixture
def tried(tmp_path, monkeypatch):
    """Trials that find AVX-512 faster, of a processor that has it, and their number."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(KERNELS, raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    info = tmp_path / "cpuinfo"
    info.write_text("vendor_id : AuthenticAMD\nflags : avx2 avx512f\n")
    monkeypatch.setattr("rlcore.cluster.cpu.kernels.Processor.here.__func__.__defaults__", (info,))
    asked = []

    def speed(candidate, shapes):
        asked.append(shapes)
        return 97.0 if candidate == "AVX512" else 71.0

    monkeypatch.setattr("rlcore.cluster.cpu.kernels.tried_speed", speed)
    return asked


def test_a_run_goes_on_with_the_kernels_that_it_began_with(tried, tmp_path):
    config = load(["experiment=quickstart", "run_dir=run", "schedule=on_policy"])
    assert run_kernels(config, trial=False).source == "unknown"
    kernels = run_kernels(config)
    assert (kernels.chosen, kernels.source) == ("AVX512", "tried") and len(tried) == 3
    assert len(tried[0]) == 4 and (512, 192) in tried[0]  # the fresh model's own
    assert [*kernel_news(config, kernels)] == [f"matrix kernels: {kernels}"]
    (tmp_path / "run").mkdir()
    write_about(tmp_path / "run", kernels, {})
    (tmp_path / "cache" / "kernels.json").unlink()
    again = run_kernels(config)
    assert (again.chosen, again.source) == ("AVX512", "run") and len(tried) == 3
    assert len([*kernel_news(config, again)]) == 1
    other = Kernels("AVX2", "environment")
    assert "begun with the kernels AVX512: sums round otherwise" in [*kernel_news(config, other)][1]
    timed = load(["experiment=quickstart", "run_dir=run"])  # its results depend on timing anyway
    assert len([*kernel_news(timed, other)]) == 1


@pytest.mark.parametrize(
    "words",
    [
        ("cluster.address=head:6379",),
        ("learner=gpu", "actor=gpu"),
        ("cluster.cpu_fast_paths=false",),
    ],
)
def test_kernels_of_other_machines_and_gpus_are_not_tried(tried, words):
    words = [w.replace("actor=gpu", "actor.bf16.num_gpus=1") for w in words]
    assert run_kernels(load(["experiment=quickstart", "run_dir=run", *words])) is None
    assert tried == []


@pytest.mark.parametrize(
    ("words", "known"),
    [
        ((), True),
        (("learner=lora",), False),
        (("learner.dtype=bfloat16", "learner.zero_stage=1"), False),
        (("actor.bf16.num_gpus=1",), False),
    ],
)
def test_a_limit_is_of_runs_whose_products_are_those_that_were_tried(words, known):
    config = load(["experiment=quickstart", "run_dir=run", *words])
    kernels = Kernels("AVX512", "tried", {"": 71.0, "AVX512": 97.0})
    found = limit_facts(config, "0123456789=ab", kernels)  # thirteen tokens
    assert bool(found) == known and limit_facts(config, "0", Kernels("", "unknown")) == {}
    if known:
        assert found["gflops"] % 97.0 == 0 and found["samples"] == 8
        assert found["trained_gflop"] == pytest.approx(3 * found["pass_gflop"])
        assert 1.5e6 < found["pass_gflop"] / 2 * 1e9 < 1.7e6  # the fresh model's parameters
