"""A head of Ray started from the lock's packages does what KubeRay asks of one."""

import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest
from timing import deadline, free_port, wait_until

BIN = Path(sys.executable).parent


@pytest.fixture
def head():
    """The head's ports: of the job server (KubeRay uses 8265) and the agent (52365)."""
    folder = tempfile.mkdtemp(prefix="rlc-", dir="/tmp")  # sockets need a short path
    port, jobs, agent = (free_port() for _ in range(3))
    words = ["--head", f"--port={port}", f"--temp-dir={folder}", "--num-cpus=1", "--block"]
    words += [f"--dashboard-port={jobs}", f"--dashboard-agent-listen-port={agent}"]
    words += ["--disable-usage-stats", "--object-store-memory=100000000"]
    env = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_AUTH_MODE")}
    process = subprocess.Popen(
        [str(BIN / "ray"), "start", *words],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    yield jobs, agent
    process.terminate()
    process.wait(deadline(60))
    shutil.rmtree(folder, ignore_errors=True)


def answers(url):
    try:
        return urllib.request.urlopen(url, timeout=5).read().decode()
    except OSError:
        return ""


@pytest.mark.slow
@pytest.mark.cluster
def test_a_head_takes_jobs_and_its_agent_answers_kuberay_s_probes(head):
    jobs, agent = head
    # the commands of KubeRay's probes, but for wget, which the images have
    for port, path in ((agent, "api/local_raylet_healthz"), (jobs, "api/gcs_healthz")):
        url = f"http://127.0.0.1:{port}/{path}"
        wait_until(lambda url=url: "success" in answers(url), 60, url, 0.5)
    submit = [str(BIN / "ray"), "job", "submit", f"--address=http://127.0.0.1:{jobs}", "--"]
    done = subprocess.run(
        [*submit, "echo", "from the job"],
        capture_output=True,
        text=True,
        timeout=deadline(120),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from the job" in done.stdout and "succeeded" in done.stdout
