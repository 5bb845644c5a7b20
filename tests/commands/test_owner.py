"""One owner a run folder."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rlcore.cli import main
from rlcore.commands import owner as module
from rlcore.commands.owner import LOCK, living_owner, own
from rlcore.errors import OwnershipLost, UserError

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
