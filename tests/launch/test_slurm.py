"""What a real Slurm does to a job, and what the run makes of it.

All of it runs every night. `--turn N` takes the mark nightly from two stops of a small job, which
rotate with N."""

import re

import pytest
from slurm_cluster import THREE, TWO, Job, lacks, small_cluster
from timing import wait_until

RLCORE = ("python", "-m", "rlcore.cli")
SINGLE = ("cluster.launch.nodes=1",)


@pytest.fixture(scope="module")
def slurm():
    if why := lacks():
        pytest.skip(why)
    with small_cluster() as cluster:
        yield cluster


def left_on(slurm, job, *nodes):
    """Ray's processes, and the job's temporary files, on these nodes."""
    found = []
    for node in nodes:
        shown = slurm.on(node, "ps", "-eo", "args").stdout
        found += [line for line in shown.splitlines() if re.search("raylet|gcs_server|ray::", line)]
        found += [n for n in slurm.on(node, "ls", "/tmp").stdout.split() if n == f"rlcore-{job.id}"]
    return found


def at_start(job):
    wait_until(lambda: list(job.run_dir.glob(f"launch/{job.id}-n?.log")), 120, "Ray's start", 0.5)


def in_checkpoint(job):
    """While a checkpoint is written."""
    job.wait_rows(1)
    wait_until(lambda: list(job.run_dir.glob("checkpoints/.step_*.partial")), 240, "one", 0.02)


OVER = ("CANCELLED", "FAILED", "COMPLETED")
MOMENTS = {"start": at_start, "training": Job.wait_rows, "checkpoint": in_checkpoint}
OFTEN = "checkpoint.every=5"


def cancel(slurm):
    """In training; then the folder's next job, while it writes a checkpoint."""
    for moment in (Job.wait_rows, in_checkpoint):
        job = slurm.launch("cancel", *TWO, OFTEN)
        before = job.newest
        moment(job)
        job.end()
        assert job.shown("JobState") == "CANCELLED" and job.shown("Restarts") == "0"
        assert job.newest == job.rows > before and "finishing the current step" in job.text
        assert left_on(slurm, job, "n1", "n2") == []


# How a job is stopped, by words on the login node, and whether Slurm then requeues it.
LARGE = ("--nodelist=n3", "--cpus-per-task=4", "--mem=6G", "--output=/dev/null")
STOPS = {
    "scancel": (("scancel", "{id}"), False),
    "rlcore cancel": ((*RLCORE, "cancel", "run_dir={run_dir}"), False),
    "scontrol requeue": (("scontrol", "requeue", "{id}"), True),
    # as Slurm does within a minute of its time, too coarse for these moments
    "time limit": (("scancel", "--batch", "--signal=USR1", "{id}"), True),
    "preemption": (("sbatch", "--partition=high", *LARGE, "--wrap=sleep 5"), True),
}


def stop(slurm, job, how):
    words, _ = STOPS[how]
    slurm.on("login", *(w.format(id=job.id, run_dir=job.run_dir) for w in words))


def stopped(slurm, how, moment):
    """A job of one node, until Slurm has it no more."""
    where = "+cluster.launch.sbatch={partition: low, nodelist: n3}"
    job = slurm.launch(f"{how} {moment}", *SINGLE, OFTEN, where)
    MOMENTS[moment](job)
    if how == "rlcore cancel":
        shown = slurm.on("login", *RLCORE, "jobs", f"run_dir={job.run_dir}").stdout
        assert re.search(rf"^ *{job.id} +RUNNING .* {job.run_dir}$", shown, re.MULTILINE)
    stop(slurm, job, how)
    requeued = STOPS[how][1]
    job.wait("JobState", *(("PENDING",) if requeued else OVER), seconds=240)
    assert job.newest == job.rows and (job.newest > 0) == (moment != "start")
    assert job.shown("Restarts") == str(int(requeued))
    assert requeued or left_on(slurm, job, "n3") == []
    if moment != "start":
        assert "finishing the current step" in job.text
    job.end()


def comes_back(job, moment, stops, restarts):
    """The job is stopped at a moment, loses no step, and goes on."""
    MOMENTS[moment](job)
    stops()
    job.wait("JobState", "PENDING", seconds=240)
    step = job.newest
    assert step == job.rows and (step > 0) == (moment != "start"), moment
    job.wait("JobState", "RUNNING", seconds=300)
    if step:
        job.wait_rows()
        assert f"continuing from step_{step:06d}" in job.text
    assert job.shown("Restarts") == str(restarts)


def requeue(slurm):
    job = slurm.launch("requeue", *TWO, OFTEN)
    for i, moment in enumerate(MOMENTS, 1):
        comes_back(job, moment, lambda: stop(slurm, job, "scontrol requeue"), i)
    job.end()
    assert job.newest == job.rows


def time_limit(slurm):
    job = slurm.launch("limit", *TWO, OFTEN, "cluster.launch.grace_s=60")

    def shorten():
        minutes = int(job.shown("RunTime").split(":")[1]) + 2
        slurm.on("login", "scontrol", "update", f"JobId={job.id}", f"TimeLimit={minutes}")

    def signal():
        stop(slurm, job, "time limit")

    comes_back(job, "start", signal, 1)
    comes_back(job, "training", shorten, 2)
    slurm.on("login", "scontrol", "update", f"JobId={job.id}", "TimeLimit=UNLIMITED")
    comes_back(job, "checkpoint", signal, 3)
    job.end()
    assert job.newest == job.rows


def preempt(slurm):
    words = ("+cluster.launch.sbatch={partition: low, nodelist: n3}", OFTEN)
    job = slurm.launch("preempt", *SINGLE, *words)
    for i, moment in enumerate(MOMENTS, 1):
        comes_back(job, moment, lambda: stop(slurm, job, "preemption"), i)
    job.end()
    assert job.newest == job.rows


def node_lost_in_training(slurm):
    node_lost(slurm, Job.wait_rows)


def node_lost(slurm, moment=in_checkpoint):
    job = slurm.launch("lost", *THREE, OFTEN)
    job.wait_rows()
    for role in ("BufferActor", "LearnerActor"):
        where = [n for n in ("n1", "n2", "n3") if runs(slurm, n, f"ray::{role}")]
        assert where == ["n1"], role  # beside the driver, as docs/scaling.md says
    moment(job)
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
    """For less than SlurmdTimeout: Slurm leaves the node in the job."""
    slurm.allow_silence(300)
    try:
        job = slurm.launch("away", *THREE, OFTEN)
        job.wait_rows()
        in_checkpoint(job)
        slurm.cut("n3")
        wait_until(lambda: "n3 has left Ray" in job.text, 120, "the cut to be seen", 0.5)
        slurm.connect("n3")
        wait_until(lambda: "n3 is back in Ray" in job.text, 240, "Ray on n3 again", 0.5)
        wait_until(lambda: runs(slurm, "n3", "ray::RolloutActor"), 240, "an actor there", 0.5)
        assert (job.shown("JobState"), job.shown("Restarts")) == ("RUNNING", "0")
        job.wait_rows()
        job.end()
        assert job.newest == job.rows
    finally:
        slurm.allow_silence(20)


def parts(slurm):
    """Nodes that are not alike: at the time limit, at the loss of a node, at `rlcore cancel`."""
    own = ("cluster.launch.learner_cpus_per_node=3", "+cluster.launch.learner_sbatch.nodelist=n3")
    job = slurm.launch("two parts", *TWO, *own, OFTEN)
    job.wait_rows()
    assert runs(slurm, "n3", "ray::LearnerActor") and runs(slurm, "n3", "ray::BufferActor")
    (actor,) = [n for n in ("n1", "n2") if runs(slurm, n, "ray::RolloutActor")]
    memory = slurm.on(actor, "sh", "-c", "ps -eo args | grep -o 'object_store_memory=[0-9]*'")
    assert int(memory.stdout.split()[0].partition("=")[2]) == int(2000 * 0.3 * 2**20)
    shown = slurm.on("login", *RLCORE, "jobs").stdout
    assert re.search(rf"^ *{job.id} +RUNNING +None +n3,{actor} ", shown, re.MULTILINE)
    assert len(shown.splitlines()) == 2  # one job, below the line of names
    again = slurm.on("login", *RLCORE, "launch", *slurm.words(), f"run_dir={job.run_dir}")
    assert f"has job {job.id} already (RUNNING)" in again.stderr
    comes_back(job, "training", lambda: stop(slurm, job, "time limit"), 1)
    (actor,) = [n for n in ("n1", "n2") if runs(slurm, n, "ray::RolloutActor")]
    slurm.kill(actor)
    try:
        job.wait("JobState", "PENDING", seconds=240)
        step = job.newest
        assert step == job.rows > 0
        job.wait("JobState", "RUNNING", seconds=300)
        job.wait_rows()
        assert f"continuing from step_{step:06d}" in job.text
        slurm.on("login", *RLCORE, "cancel", f"run_dir={job.run_dir}")
        job.wait("JobState", "FAILED", "CANCELLED")
        assert job.newest == job.rows and left_on(slurm, job, "n1", "n2", "n3") == []
        wait_until(lambda: not slurm.on("login", "squeue", "-h").stdout, 60, "both parts", 0.5)
    finally:
        slurm.boot(actor)


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
    """On one node: both start at once, then one comes while the other writes a checkpoint or
    trains."""
    where = ("+cluster.launch.sbatch={nodelist: n2}", OFTEN)
    first, second = (slurm.launch("run", *SINGLE, *where, user=user) for user in ("alice", "bob"))
    first.wait_rows()
    second.wait_rows()
    second.end()
    for moment in (in_checkpoint, Job.wait_rows):
        moment(first)
        third = slurm.launch("again", *SINGLE, *where, user="bob")
        third.wait_rows()
        first.wait_rows()
        third.end()
    first.end()
    assert all(job.newest == job.rows > 0 for job in (first, second, third))


def finished(slurm):
    """A run that ends by itself, in a folder with a space, and its metrics meanwhile."""
    page = ("logging.prometheus_port=9105", "logging.prometheus_host=0.0.0.0")
    job = slurm.launch("a run", *SINGLE, *page, steps=30)
    job.wait_rows(1)
    # what `ssh -L 9105:n1:9105 login` connects to
    shown = slurm.on("login", "wget", "-q", "-T", "20", "-O-", "http://n1:9105/metrics").stdout
    assert "rlcore_" in shown
    shown = slurm.on("n1", "sh", "-c", "cat /proc/$(pgrep -o raylet)/limits").stdout
    soft, hard = re.search(r"Max open files +(\d+) +(\d+)", shown).groups()
    assert soft == hard  # Ray opens a file for each of its connections
    job.wait("JobState", "COMPLETED", seconds=240)
    assert job.newest == job.rows == 30 and left_on(slurm, job, "n1") == []
    lines = [line for line in job.text.splitlines() if line.strip()]
    odd = [line for line in lines if re.search("srun|slurmstepd|error|CANCELLED|ray stop", line)]
    assert odd == [], odd
    assert "step 30/30" in job.text and "Ray runtime" not in job.text  # Ray's banners: 2-n1.log


def in_salloc(slurm):
    """The recipes of docs/scaling.md: the script by srun in an allocation of several nodes, and a
    run of one node."""
    run_dir = slurm.state / "by hand"
    words = slurm.words(*TWO, f"run_dir={run_dir}", steps=5)
    printed = slurm.on("login", *RLCORE, "launch", *words, "dry_run=true").stdout
    script = slurm.state / "job.sh"
    script.write_text(printed.split("# command\n")[0])
    nodes = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2")
    first = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpus-per-task=2")
    command = slurm.command("login", "salloc", *nodes, *first, "bash", str(script))
    done = slurm.run(command, seconds=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 5
    own = [word for word in slurm.words(steps=5) if not word.startswith(("cluster=", "+cluster."))]
    own = [word for word in own if not word.startswith("cluster.launch.")]
    step = ("srun", *RLCORE, "train", *own, f"run_dir={slurm.state}/one")
    command = slurm.command("login", "salloc", "--nodes=1", "--cpus-per-task=2", *step)
    done = slurm.run(command, seconds=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len((slurm.state / "one/metrics.jsonl").read_text().splitlines()) == 5


CASES = {
    case.__name__: case
    for case in (
        *(cancel, node_lost, node_lost_in_training, requeue, preempt, node_away, time_limit),
        *(two_users, bad_node, finished, in_salloc, parts),
    )
}
AT_START = [(how, "start") for how in STOPS if how != "rlcore cancel"]
LATER = [(how, moment) for moment in ("training", "checkpoint") for how in STOPS]


def of_turn(turn):
    """The stops of a turn: one at the start, which takes seconds, and a later one."""
    return {AT_START[turn % len(AT_START)], LATER[turn % len(LATER)]}


def pytest_generate_tests(metafunc):
    if "moment" in metafunc.fixturenames:
        turn = metafunc.config.getoption("--turn")
        now = set() if turn is None else of_turn(turn)
        marks = {cell: [] if cell in now else pytest.mark.nightly for cell in AT_START + LATER}
        cells = [pytest.param(*cell, marks=m, id="-".join(cell)) for cell, m in marks.items()]
        metafunc.parametrize(("how", "moment"), cells)


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_job_that_is_stopped_loses_no_step(how, moment, slurm):
    stopped(slurm, how, moment)


@pytest.mark.cluster
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
def test_a_job_meets(case, slurm):
    CASES[case](slurm)


def test_turns_have_all_stops():
    turns = range(3, 3 + len(LATER))
    assert set().union(*map(of_turn, turns)) == {*AT_START, *LATER}
