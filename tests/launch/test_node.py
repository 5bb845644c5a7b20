"""One node of a Slurm job: Ray (here a stand-in) is started again, named when it fails, and kept
from Slurm's SIGTERM."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from timing import deadline, free_port, wait_until

from rlcore.cluster import joined
from rlcore.cluster.joined import missing, wait
from rlcore.launch.address import own_address
from rlcore.launch.node import JobNode

RESOURCES = ['--learner-resources={"l": 1}', '--actor-resources={"a": 1}']
UP = """
echo "Ray runtime started."
echo $$ >> "$LOG"
sleep 1000 &
sleep 1001
"""


@pytest.fixture
def node(tmp_path):
    """Starts the process of a node with a stand-in of `ray`; returns it."""
    started = []

    def start(ray, *, index=0, script=0, port=1, **environment):
        (tmp_path / "ray").write_text(f"#!/usr/bin/env bash\n{ray}\n")
        (tmp_path / "ray").chmod(0o755)
        words = [f"--address=127.0.0.1:{port}", "--cpus=2", "--gpus=0", f"--folder={tmp_path}"]
        words += ["--start-timeout-s=60", f"--script={script}", "--learner-nodes=1", *RESOURCES]
        env = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "LOG": str(tmp_path / "log"),
            "SLURM_NODEID": str(index),
            "SLURMD_NODENAME": f"n{index + 1}",
            "SLURM_JOB_ID": f"test{os.getpid()}",
            **environment,
        }
        command = [sys.executable, "-m", "rlcore.launch.node", *words]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def pids(tmp_path):
    log = tmp_path / "log"
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def blocks_term(pid):
    """True where SIGTERM is blocked or waited for: the mask that the kernel shows of a process in
    rt_sigtimedwait (128 on x86-64, 137 on arm) leaves out the signals that it waits for."""
    if Path(f"/proc/{pid}/syscall").read_text().split()[0] in ("128", "137"):
        return True
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"SigBlk:\s*(\w+)", status)[1], 16) >> (signal.SIGTERM - 1) & 1


@pytest.mark.processes
def test_ray_that_ends_is_started_again_and_ends_with_its_children_on_sigusr1(node, tmp_path):
    process = node(UP)
    (first,) = wait_until(lambda: pids(tmp_path), 30, "Ray")
    assert b"RAY_worker_niceness=0" in Path(f"/proc/{first}/environ").read_bytes()
    family = psutil.Process(first).children()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: len(pids(tmp_path)) == 2, 30, "Ray again")
    assert not any(child.is_running() for child in family)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(deadline(30)) == 0
    assert len(family) >= 2 and not any(child.is_running() for child in family)
    assert "n1: Ray ended (exit code -9: Ray runtime started.); it is started" in (
        process.stdout.read()
    )


@pytest.mark.processes
def test_a_failed_start_is_named_by_its_last_line_and_ends_the_node_after_three(node, tmp_path):
    process = node(
        'echo $$ >> "$LOG"; echo first; printf "\\x1b[1mno space left\\x1b[0m\\n\\n"; exit 7'
    )
    assert process.wait(deadline(60)) == 1
    said = process.stdout.read().splitlines()
    why = "rlcore: n1: Ray did not start (exit code 7: no space left)"
    assert said == [f"{why}; it is tried again"] * 2 + [why] and len(pids(tmp_path)) == 3
    (failed,) = tmp_path.glob("*.failed")
    assert failed.read_text() == f"{why}\n"
    assert wait("127.0.0.1:1", 1000.0, failed, ["n1"]) == 1


@pytest.mark.processes
def test_sigterm_reaches_neither_ray_nor_the_node_and_is_passed_to_the_batch_script(node, tmp_path):
    script = subprocess.Popen(["sleep", "1000"])
    process = node(UP, script=script.pid)
    (ray,) = wait_until(lambda: pids(tmp_path), 30, "Ray")
    for child in (*psutil.Process(ray).children(), psutil.Process(ray), process):
        child.send_signal(signal.SIGTERM)  # as Slurm does to every process of a job
    assert script.wait(deadline(30)) == -signal.SIGTERM
    assert process.poll() is None and psutil.Process(ray).is_running()
    assert pids(tmp_path) == [ray]


@pytest.mark.processes
def test_another_node_waits_for_the_head_and_does_not_pass_signals_on(node, tmp_path):
    script = subprocess.Popen(["sleep", "1000"])
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        process = node(UP, index=1, script=script.pid, port=head.getsockname()[1])
        wait_until(lambda: blocks_term(process.pid), 30, "the node's process to be up")
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
        assert not pids(tmp_path)  # it binds the port and does not listen
        head.listen()
        wait_until(lambda: pids(tmp_path), 30, "Ray")
    assert script.poll() is None
    script.kill()


def command(index, monkeypatch, *, part=0, **environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made = JobNode("10.0.0.1:20007", 4, 8, "{}", "/run", 60.0, 1, index, "n1", "7", part)
    return made.command()


def test_jobs_that_share_a_node_share_no_port_or_folder(monkeypatch):
    head, other = (command(i, monkeypatch) for i in range(2))
    assert {"--head", "--port=20007", "--node-ip-address=10.0.0.1"} <= set(head)
    assert "--address=10.0.0.1:20007" in other and "--head" not in other
    assert "--ray-client-server-port=40007" in head
    for words in (head, other):
        assert {"--temp-dir=/tmp/rlcore-7", "--max-worker-port=0", "--num-gpus=8"} <= set(words)


def test_the_object_store_is_a_share_of_the_job_s_memory(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"total": 2**40}))
    of_node = command(0, monkeypatch, SLURM_MEM_PER_NODE="1000")
    assert f"--object-store-memory={300 * 2**20}" in of_node
    monkeypatch.delenv("SLURM_MEM_PER_NODE")
    of_cpus = command(0, monkeypatch, SLURM_MEM_PER_CPU="500", SLURM_CPUS_ON_NODE="4")
    assert f"--object-store-memory={600 * 2**20}" in of_cpus
    # the parts of a job: the variable without an end is the first one's everywhere
    parts = {f"SLURM_MEM_PER_NODE_HET_GROUP_{i}": str(1000 * i) for i in (1, 2)}
    of_part = command(1, monkeypatch, part=1, SLURM_HET_SIZE="2", SLURM_MEM_PER_NODE="9", **parts)
    assert f"--object-store-memory={300 * 2**20}" in of_part
    for name in ("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_NODE", "SLURM_HET_SIZE"):
        monkeypatch.delenv(name)
    assert not any("object-store" in word for word in command(0, monkeypatch))


def test_the_address_is_of_the_interface_or_towards_another_node():
    assert own_address("lo", "") == "127.0.0.1"
    with pytest.raises(SystemExit, match=r"interface=ib7 has no IPv4 address on .*among .*lo"):
        own_address("ib7", "")
    assert own_address("", "127.0.0.9").count(".") == 3


def test_hosts_that_have_not_joined_are_named(tmp_path, capsys):
    assert missing(["n1", "n2", "n3.x.org"], ["n1.x.org", "n3"]) == ["n2"]
    port = free_port()
    assert wait(f"127.0.0.1:{port}", 0.0, tmp_path / "no", ["n1", "n2"]) == 1
    said = "nodes that have not joined Ray after 0 s: n1, n2 (cluster.launch.start_timeout_s=0)"
    assert capsys.readouterr().out == f"rlcore: {said}\n"


def test_a_node_that_leaves_and_returns_is_named_and_too_few_requeue_the_job(monkeypatch, capsys):
    hosts = ["n1", "n2", "n3"]
    seen = iter([hosts, ["n1", "n2"], [], hosts, ["n1"], ["n1"]])
    clock, told = iter([0.0, 10.0, 40.0, 50.0, 171.0]), []
    monkeypatch.setattr(joined, "living", lambda address: next(seen))
    monkeypatch.setattr(joined.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(joined.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(joined.os, "kill", lambda *words: told.append(words))
    joined.watch("10.0.0.1:1", 2, 77, hosts)
    assert told == [(77, signal.SIGUSR1)]
    assert capsys.readouterr().out.splitlines() == [
        "rlcore: n3 has left Ray",
        "rlcore: n3 is back in Ray after 30 s",
        "rlcore: n2 has left Ray",
        "rlcore: n3 has left Ray",
        "rlcore: 1 of 3 nodes are left, fewer than 2 (cluster.launch.min_actor_nodes): the job is "
        "requeued at a checkpoint",
    ]
