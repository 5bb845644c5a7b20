"""Forks of a process with imports: each is the process that was asked for."""

import os
import signal
import subprocess
import sys

import pytest
from timing import deadline

from rlcore.cluster.ray_cluster import _warm
from rlcore.cluster.specs import WARM, python_words
from rlcore.cluster.warm import Nursery

pytestmark = pytest.mark.processes

PROGRAM = """
import json, os, signal, sys, time
held = "json.tool" in sys.modules  # imported by the server alone
seen = [held, sys.argv, os.getcwd(), os.environ.get("MINE"), sys.stdin.read()]
print(json.dumps(seen), flush=True)
if sys.argv[1] == "wait":
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
    print("ready", flush=True)
    time.sleep(600)
sys.exit(3)
"""


@pytest.fixture
def server(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    with Nursery(tmp_path, ["json.tool"]):
        yield
    assert WARM not in os.environ


def asked(folder, *words):
    return subprocess.Popen(
        [*python_words(), str(folder / "program.py"), *words],
        cwd=folder,
        env={**os.environ, "MINE": "here"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_fork_has_imports_and_the_files_folder_and_environment_of_who_asked(server, tmp_path):
    out, _ = (one := asked(tmp_path, "a b")).communicate("said", timeout=deadline(60))
    program = str(tmp_path / "program.py")
    assert out.strip() == f'[true, ["{program}", "a b"], "{tmp_path}", "here", "said"]'
    assert one.returncode == 3


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGKILL])
def test_a_signal_reaches_the_fork(server, tmp_path, number):
    one = asked(tmp_path, "wait")
    one.stdin.close()
    assert one.stdout.readline().startswith("[true") and one.stdout.readline() == "ready\n"
    one.send_signal(number)
    assert one.wait(deadline(60)) == (7 if number == signal.SIGUSR1 else -signal.SIGKILL)
    assert one.stdout.read() == ""  # the end of its writer


def test_without_a_server_it_is_the_process_itself(tmp_path, monkeypatch):
    monkeypatch.setenv(WARM, str(tmp_path / "none"))
    (tmp_path / "program.py").write_text(PROGRAM)
    out, _ = asked(tmp_path, "x").communicate("", timeout=deadline(60))
    assert out.startswith("[false")


def test_the_workers_of_a_warm_ray_are_forks(monkeypatch):
    option = "--python_worker_command="
    command = ["raylet", f"{option}{sys.executable} setup_worker.py x", "--other"]
    monkeypatch.delenv(WARM, raising=False)
    assert _warm(command) == command
    monkeypatch.setenv(WARM, "/tmp/s")
    assert _warm(command)[1].endswith("/warm.py /tmp/s setup_worker.py x")


def test_a_stop_while_imports_load_ends_them(tmp_path, monkeypatch):
    def stopped(*files):
        raise KeyboardInterrupt

    nursery = Nursery(tmp_path, ["json.tool"])
    monkeypatch.setattr("rlcore.cluster.warm.select.select", stopped)
    with pytest.raises(KeyboardInterrupt), nursery:
        pass
    assert nursery._server.returncode == -signal.SIGKILL and WARM not in os.environ
