"""What a real Slurm does to a job, and what the run makes of it: a whole run each.

All of them run every night; `--turn N` selects two that rotate with N."""

import re
import shutil
import tempfile
from pathlib import Path

import pytest
from slurm_cluster import THREE, TWO, Cluster, lacks
from timing import wait_until

SINGLE = ("cluster.launch.nodes=1",)


@pytest.fixture(scope="module")
def slurm():
    if why := lacks():
        pytest.skip(why)
    state = Path(tempfile.mkdtemp(prefix="rlc-", dir="/tmp"))
    state.chmod(0o755)
    cluster = None
    try:
        cluster = Cluster(state)
        yield cluster
    finally:
        if cluster is not None:
            cluster.close()
        shutil.rmtree(state, ignore_errors=True)


def left_on(slurm, job, *nodes):
    """Ray's processes, and the job's temporary files, on these nodes."""
    found = []
    for node in nodes:
        shown = slurm.on(node, "ps", "-eo", "args").stdout
        found += [line for line in shown.splitlines() if re.search("raylet|gcs_server|ray::", line)]
        found += [n for n in slurm.on(node, "ls", "/tmp").stdout.split() if n == f"rlcore-{job.id}"]
    return found


def cancel(slurm):
    job = slurm.launch("cancel", *TWO)
    job.wait_rows()
    job.end()
    assert job.shown("JobState") == "CANCELLED" and job.shown("Restarts") == "0"
    assert job.newest == job.rows > 0 and "finishing the current step" in job.text
    assert left_on(slurm, job, "n1", "n2") == []


def cancel_at_the_start(slurm):
    job = slurm.launch("early", *TWO)
    wait_until(lambda: list(job.run_dir.glob("launch/*-n1.log")), 120, "Ray's start", 0.5)
    job.end()
    assert job.shown("JobState") == "CANCELLED" and job.shown("Restarts") == "0"
    assert job.rows == 0 and left_on(slurm, job, "n1", "n2") == []


def cancel_by_rlcore(slurm):
    job = slurm.launch("ended", *SINGLE)
    job.wait_rows()
    again = slurm.on("login", "python", "-m", "rlcore.cli", "jobs", f"run_dir={job.run_dir}")
    assert re.search(rf"^ *{job.id} +RUNNING .* {job.run_dir}$", again.stdout, re.MULTILINE)
    slurm.on("login", "python", "-m", "rlcore.cli", "cancel", f"run_dir={job.run_dir}")
    job.wait("JobState", "FAILED", "COMPLETED", "CANCELLED")
    assert job.newest == job.rows > 0 and job.shown("Restarts") == "0"


def requeue(slurm):
    job = slurm.launch("requeue", *TWO)
    job.wait_rows()
    slurm.on("login", "scontrol", "requeue", job.id)
    job.wait("JobState", "PENDING")
    assert job.newest == job.rows > 0
    went_on(job)


def went_on(job):
    """The job has resumed where it was stopped."""
    stopped = job.newest
    job.wait("JobState", "RUNNING", seconds=300)
    job.wait_rows()
    assert f"continuing from step_{stopped:06d}" in job.text and job.shown("Restarts") == "1"
    job.end()
    assert job.newest == job.rows


def time_limit(slurm):
    job = slurm.launch("limit", *TWO, "cluster.launch.grace_s=60")
    job.wait_rows()
    minutes = int(job.shown("RunTime").split(":")[1]) + 2
    slurm.on("login", "scontrol", "update", f"JobId={job.id}", f"TimeLimit={minutes}")
    job.wait("JobState", "PENDING", seconds=240)
    assert job.newest == job.rows > 0
    went_on(job)


def preempt(slurm):
    words = ("+cluster.launch.sbatch={partition: low, nodelist: n3}",)
    job = slurm.launch("preempt", *SINGLE, *words)
    job.wait_rows()
    other = ("--cpus-per-task=4", "--mem=6G", "--output=/dev/null", "--wrap=sleep 5")
    slurm.on("login", "sbatch", "--partition=high", "--nodelist=n3", *other)
    job.wait("JobState", "PENDING")
    assert job.newest == job.rows > 0
    went_on(job)


def node_lost(slurm):
    job = slurm.launch("lost", *THREE)
    job.wait_rows()
    for role in ("BufferActor", "LearnerActor"):
        where = [n for n in ("n1", "n2", "n3") if runs(slurm, n, f"ray::{role}")]
        assert where == ["n1"], role  # beside the driver, as docs/scaling.md says
    slurm.kill("n3")
    try:
        job.wait_rows(20)
        assert (job.shown("JobState"), job.shown("Restarts")) == ("RUNNING", "0")
        assert not [note for note in job.notes() if "recovery 1 of" in note]
        wait_until(lambda: "n3 has left Ray" in job.text, 120, "the loss to be named", 0.5)
        job.end()
        assert job.newest == job.rows
    finally:
        slurm.boot("n3")


def runs(slurm, node, title):
    return title in slurm.on(node, "ps", "-eo", "args").stdout


def node_away(slurm):
    job = slurm.launch("away", *THREE)
    job.wait_rows()
    slurm.cut("n3")
    wait_until(lambda: "n3 has left Ray" in job.text, 120, "the cut to be seen", 0.5)
    slurm.connect("n3")
    wait_until(lambda: "n3 is back in Ray" in job.text, 240, "Ray on n3 again", 0.5)
    wait_until(lambda: runs(slurm, "n3", "ray::RolloutActor"), 240, "an actor there", 0.5)
    assert (job.shown("JobState"), job.shown("Restarts")) == ("RUNNING", "0")
    job.wait_rows()
    job.end()
    assert job.newest == job.rows


def bad_node(slurm):
    """Ray cannot make its folder on n2."""
    tmp = slurm.state / "root/n2/tmp"
    tmp.chmod(0o755)
    try:
        job = slurm.launch("bad", *TWO, user="alice")
        said = "n2: Ray did not start"
        wait_until(lambda: said in job.text, 120, "the node to be named", 0.5)
        assert "Permission denied" in job.text
        job.wait("JobState", "PENDING", seconds=240)  # tried again
        job.end()
    finally:
        tmp.chmod(0o1777)


def two_users(slurm):
    """One after the other, and together, on one node."""
    where = "+cluster.launch.sbatch={nodelist: n2}"
    jobs = [slurm.launch("run", *SINGLE, where, user=user) for user in ("alice", "bob")]
    for job in jobs:
        job.wait_rows()
    for job in jobs:
        job.end()
        assert job.newest == job.rows > 0


CASES = {
    case.__name__: case
    for case in (
        *(cancel, node_lost, requeue, cancel_at_the_start, preempt, node_away),
        *(time_limit, two_users, bad_node, cancel_by_rlcore),
    )
}
A_TURN = 2


def of_turn(turn):
    """The cases of a turn; five turns in a row have all of them."""
    names = list(CASES)
    return {names[(A_TURN * turn + i) % len(names)] for i in range(A_TURN)}


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        turn = metafunc.config.getoption("--turn")
        now = set() if turn is None else of_turn(turn)
        marks = {name: () if name in now else pytest.mark.nightly for name in CASES}
        metafunc.parametrize("case", [pytest.param(n, marks=m) for n, m in marks.items()])


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_job_meets(case, slurm):
    CASES[case](slurm)


def test_turns_have_all_cases():
    assert set().union(*map(of_turn, range(3, 8))) == set(CASES)
