"""The Slurm batch script, run with stand-ins of the cluster's programs. On a real Slurm:
test_slurm.py."""

import os
import resource
import signal
import stat
import subprocess

import pytest
from timing import deadline, wait_until

from rlcore.errors import UserError
from rlcore.launch.job import render
from rlcore.launch.specs import LaunchSpec

WORDS = ["experiment=math_fp8_gpu", "run_dir=/data/a b", "model.path=it's"]
# Each writes its arguments to $LOG; `srun` runs its command here.
PROGRAMS = {
    "scontrol": """
echo "scontrol $*" >> "$LOG"
case "$2" in
  hostnames)
    case "$3" in
      "n[1-3]") printf "n1\\nn2\\nn3\\n" ;;
      "n[2-3]") printf "n2\\nn3\\n" ;;
      *) echo "$3" ;;
    esac ;;
  job) echo "JobId=7 JobState=RUNNING Reason=None PreemptTime=${PREEMPTED:-None}" ;;
esac
""",
    "srun": """
echo "srun $*" >> "$LOG"
while [[ "$1" == --* ]]; do shift; done
exec "$@"
""",
    "apptainer": """
echo "apptainer $*" >> "$LOG"
while [ "$1" != image.sif ]; do shift; done
shift
exec "$@"
""",
    "python": """
case "$2" in
  rlcore.launch.address) echo 10.0.0.1 ;;
  rlcore.launch.node)
    trap 'echo "node ended" >> "$LOG"; exit 0' USR1
    trap '' TERM
    echo "auth $RAY_AUTH_MODE ${#RAY_AUTH_TOKEN}" >> "$LOG"
    echo "node ${*:3}" >> "$LOG"
    while :; do sleep 0.05; done ;;
  rlcore.cluster.joined)
    [ "$3" = wait ] || { echo "watching ${*:3}" >> "$LOG"; exec sleep 60; }
    until grep -q "^node" "$LOG"; do sleep 0.05; done
    echo "joined ${*:3}" >> "$LOG"
    eval "${JOIN:-exit 0}" ;;
esac
""",
    "rlcore": """
echo "rlcore $*" >> "$LOG"
for w; do echo "word:$w" >> "$LOG"; done
eval "$RUN"
""",
}
UNTIL_TOLD = """
trap 'echo checkpoint >> "$LOG"; exit 130' TERM
echo up >> "$LOG"
while :; do sleep 0.05; done
"""


@pytest.fixture
def allocation(tmp_path):
    """Starts the batch script of a three-node allocation; returns a function that gives (process,
    log path)."""
    for name, body in PROGRAMS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    started = []

    def start(settings=(), edit=lambda script: script, **environment):
        spec = LaunchSpec(
            kind="slurm",
            nodes=3,
            learner_nodes=1,
            gpus_per_node=8,
            env={"GREETING": "a 'b' c"},
            setup=[f'export PATH={tmp_path}/bin:"$PATH"'],
            **dict(settings),
        )
        run_dir = tmp_path / "a run"
        (script, text) = next(iter(render(spec, WORDS, str(run_dir)).files.items()))
        (run_dir / "launch").mkdir(parents=True, exist_ok=True)
        (run_dir / "launch/job.sbatch").write_text(edit(text))
        log = tmp_path / "log"
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n1"}
        env = os.environ | slurm | {"LOG": str(log), "RUN": "exit 0", **environment}
        started.append(subprocess.Popen(["bash", script], env=env, start_new_session=True))
        return started[-1], log

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def lines(log):
    return log.read_text().splitlines() if log.exists() else []


REQUEUED = "scontrol requeue 7"


@pytest.mark.processes
@pytest.mark.parametrize("check", [["bash", "-n"], ["shellcheck", "-s", "bash", "-"]], ids="-".join)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"nodes": 8, "gpus_per_node": 8, "learner_nodes": 3, "env": {"A": "it's"}},
        {"container_image": "a#b", "interface": "ib0", "sbatch": {"comment": "a b", "no-kill": ""}},
        {"nodes": 2, "learner_nodes": 1, "learner_sbatch": {"constraint": "a|b"}},
    ],
    ids=["least", "large", "image", "parts"],
)
def test_the_batch_script_is_valid_bash(more, check):
    if subprocess.run(["which", check[0]], capture_output=True).returncode:
        pytest.skip(f"{check[0]} is not installed")
    (text,) = render(LaunchSpec(kind="slurm", **more), WORDS, "/data/a b").files.values()
    checked = subprocess.run(check, input=text, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_options_are_quoted_as_sbatch_reads_them():
    spec = LaunchSpec(kind="slurm", sbatch={"comment": "a b", "exclusive": "", "time": "4:00:00"})
    (text,) = render(spec, WORDS, "/data/a b%").files.values()
    options = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --comment='a b'" in options and "#SBATCH --exclusive" in options
    assert "#SBATCH --mem=0" in options  # of nodes that it has alone
    assert "#SBATCH --time=4:00:00" in options and "#SBATCH --requeue" in options
    assert "#SBATCH --output='/data/a b%%/launch/slurm-%j.out'" in options
    assert "#SBATCH --signal=B:USR1@300" in options and "#SBATCH --no-kill" not in options


UNLIKE = {"nodes": 3, "learner_nodes": 1, "learner_gpus_per_node": 8, "learner_cpus_per_node": 64}


def test_nodes_that_are_not_alike_are_two_parts_with_options_of_their_own():
    """Slurm passes the job's options on from the first part, but not these."""
    spec = LaunchSpec(
        kind="slurm",
        **UNLIKE,
        memory_gib_per_node=32,
        learner_memory_gib_per_node=900,
        sbatch={"partition": "cpu", "time": "4:00:00"},
        learner_sbatch={"partition": "gpu", "exclusive": ""},
    )
    spec.check("cluster.launch")
    (text,) = render(spec, WORDS, "/data/a b").files.values()
    options = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    at = options.index("#SBATCH hetjob")
    first, second = (
        {line.removeprefix("#SBATCH --") for line in lines}
        for lines in (options[:at], options[at + 1 :])
    )
    one = {"nodes=1", "cpus-per-task=64", "gpus-per-node=8", "mem=900G", "partition=gpu"}
    assert one | {"exclusive", "requeue", "signal=B:USR1@300", "time=4:00:00"} < first
    assert second == {
        *("nodes=2", "cpus-per-task=8", "mem=32G", "partition=cpu", "ntasks-per-node=1"),
        "time=4:00:00",
    }
    assert "no-kill" not in first  # Slurm would requeue one part and go on with the other
    assert "cpus=(64 8) gpus=(8 0) " in text


def test_equal_amounts_need_no_parts():
    same = LaunchSpec(kind="slurm", nodes=2, learner_nodes=1, learner_cpus_per_node=8)
    assert len(same.parts) == 1
    assert "hetjob" not in next(iter(render(same, WORDS, "/data/a").files.values()))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"learner_sbatch": {"time": "9"}}, r"learner_sbatch\.time=9 .* give .*sbatch\.time\."),
        ({"learner_sbatch": {"qos": "high"}}, r"Slurm passes it on .*: give .*launch\.sbatch\.qos"),
        ({"learner_sbatch": {"nodes": "9"}}, r"learner_sbatch\.nodes is what rlcore gives"),
        ({"learner_memory_gib_per_node": 9}, r"launch\.memory_gib_per_node=null would give"),
        ({"min_actor_nodes": 1}, r"min_actor_nodes .* not accepted in a job of two parts"),
        ({"sbatch": {"no-kill": ""}}, r"sbatch\.no-kill are not accepted in a job of two parts"),
    ],
)
def test_what_slurm_does_not_do_by_parts_is_refused(more, said):
    with pytest.raises(UserError, match=said):
        LaunchSpec(kind="slurm", **UNLIKE, **more).check("cluster.launch")


@pytest.mark.processes
def test_each_part_has_its_words_of_one_step(allocation):
    own = {"learner_cpus_per_node": 64, "learner_gpus_per_node": 4}
    parts = {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NODELIST_HET_GROUP_0": "n1"}
    process, log = allocation(own, **parts, SLURM_JOB_NODELIST_HET_GROUP_1="n[2-3]")
    assert process.wait(timeout=deadline(30)) == 0
    (step,) = [line for line in lines(log) if line.startswith("srun")]
    first, second = step.removeprefix("srun ").split(" : ")
    for part, text, count, cpus, gpus in ((0, first, 1, 64, 4), (1, second, 2, 8, 8)):
        assert text.startswith(f"--het-group={part} --nodes={count} --ntasks={count} ")
        assert f"--cpus-per-task={cpus} " in text and f"--cpus={cpus} --gpus={gpus} " in text
    (joined,) = [line for line in lines(log) if line.startswith("joined")]
    assert joined.endswith(" n1 n2 n3")


@pytest.mark.processes
def test_a_script_of_two_parts_needs_a_job_of_two(allocation):
    process, log = allocation({"learner_cpus_per_node": 64})
    assert process.wait(timeout=deadline(30)) != 0
    assert not [line for line in lines(log) if line.startswith(("srun", "rlcore"))]


def test_nodes_of_actors_alone_may_be_lost():
    own = LaunchSpec(kind="slurm", nodes=8, learner_nodes=2)
    assert "\n#SBATCH --no-kill\n" in next(iter(render(own, WORDS, "/data/a").files.values()))
    assert (own.least_nodes, LaunchSpec(nodes=8).least_nodes) == (5, 0)
    assert LaunchSpec(nodes=8, learner_nodes=2, min_actor_nodes=6).least_nodes == 8
    with pytest.raises(UserError, match="min_actor_nodes=7 is more than the 6 nodes"):
        LaunchSpec(nodes=8, learner_nodes=2, min_actor_nodes=7).check("cluster.launch")


@pytest.mark.processes
def test_ray_starts_on_every_node_then_the_run_then_ray_ends(allocation):
    process, log = allocation(RUN='echo "greeting $GREETING" >> "$LOG"; exit 3')
    assert process.wait(timeout=deadline(30)) == 3
    found = lines(log)
    (step,) = [line for line in found if line.startswith("srun")]
    assert "--nodes=3 --ntasks=3 --ntasks-per-node=1 --cpus-per-task=8 " in step
    assert "--no-kill" in step and "--export=ALL" in step
    (node,) = [line for line in found if line.startswith("node -")]
    for word in ("--address=10.0.0.1:20007", "--cpus=8", "--gpus=8", "--learner-nodes=1"):
        assert f"{word} " in node
    assert f"--script={process.pid} " in node and f"--folder={log.parent}/a run/launch" in node
    order = [line.split()[0] for line in found]
    assert order.index("joined") < order.index("rlcore") < found.index("node ended")
    (joined,) = [line for line in found if line.startswith("joined")]
    assert joined.startswith("joined wait 10.0.0.1:20007 600 ") and joined.endswith(" n1 n2 n3")
    # the learner's node and half of the other two
    assert f"watching watch 10.0.0.1:20007 2 {process.pid} n1 n2 n3" in found
    words = [line.removeprefix("word:") for line in found if line.startswith("word:")]
    again = ["resume=auto", "takeover_after_s=60"]
    assert words == ["train", *WORDS, *again, "cluster.address=10.0.0.1:20007"]
    assert "greeting a 'b' c" in found and REQUEUED not in found and "auth token 64" in found


@pytest.mark.processes
def test_the_job_s_processes_may_open_as_many_files_as_the_node_allows(allocation):
    def low(script):
        return script.replace("#!/usr/bin/env bash\n", "#!/usr/bin/env bash\nulimit -Sn 200\n", 1)

    process, log = allocation(edit=low, RUN='echo "files $(ulimit -Sn)" >> "$LOG"')
    assert process.wait(deadline(30)) == 0
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert f"files {most}" in lines(log) and most > 200


@pytest.mark.processes
def test_with_pyxis_every_command_is_a_job_step_in_the_image(allocation):
    image = {"container_image": "reg#rlcore:cuda", "container_mounts": ["/data:/data"]}
    process, log = allocation(image, RUN="exit 0")
    assert process.wait(timeout=deadline(30)) == 0
    steps = [line for line in lines(log) if line.startswith("srun")]
    words = "--container-image=reg#rlcore:cuda --container-mounts=/tmp:/tmp,/data:/data"
    assert len(steps) == 5 and all(f"{words} " in step for step in steps)
    # the address, the wait for all nodes, their watch, and the run are on the first node
    assert len([step for step in steps if "--overlap" in step and "--nodelist=n1 " in step]) == 4


@pytest.mark.processes
def test_with_apptainer_every_command_is_run_by_it(allocation):
    image = {"container_image": "image.sif", "container_runtime": "apptainer"}
    process, log = allocation(image, RUN="exit 3")
    assert process.wait(timeout=deadline(30)) == 3
    found = [x for x in lines(log) if x.startswith("apptainer exec --nv image.sif ")]
    assert sorted(x.split()[4] for x in found) == ["bash", *["python"] * 4]


@pytest.mark.processes
def test_nodes_that_do_not_join_end_the_job_without_a_run_and_it_is_tried_again(allocation):
    process, log = allocation(JOIN="exit 1")
    assert process.wait(timeout=deadline(30)) == 1
    found = lines(log)
    assert not [line for line in found if line.startswith("rlcore")]
    assert REQUEUED in found and "node ended" in found


@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "preempted", "requeued"),
    [
        (signal.SIGUSR1, None, True),  # the time limit
        (signal.SIGTERM, None, False),  # scancel
        (signal.SIGTERM, "2026-01-01T00:00:00", True),
    ],
    ids=["limit", "cancel", "preempt"],
)
def test_a_signal_reaches_the_run_and_a_cancelled_job_is_not_requeued(
    allocation, number, preempted, requeued
):
    more = {"PREEMPTED": preempted} if preempted else {}
    process, log = allocation(RUN=UNTIL_TOLD, **more)
    wait_until(lambda: "up" in lines(log), 30, "the run to be up")
    process.send_signal(number)
    assert process.wait(timeout=deadline(30)) == 130
    found = lines(log)
    assert "checkpoint" in found and "node ended" in found and (REQUEUED in found) == requeued


@pytest.mark.processes
@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_signal_before_the_run_ends_the_job_without_it(allocation, number, requeued):
    process, log = allocation(JOIN='echo waiting >> "$LOG"; while :; do sleep 0.05; done')
    wait_until(lambda: "waiting" in lines(log), 30, "the nodes to be waited for")
    process.send_signal(number)
    assert process.wait(timeout=deadline(30)) == 130
    found = lines(log)
    assert not [line for line in found if line.startswith("rlcore")]
    assert "node ended" in found and (REQUEUED in found) == requeued


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "record", "requeued"),
    [
        (1, None, True),
        (1, "step_000007 3", True),  # three restarts, of an older checkpoint
        (1, "step_000010 2", True),
        (1, "step_000010 3", False),
        (2, None, False),
        (0, None, False),
    ],
)
def test_a_failed_run_is_tried_again_while_checkpoints_come(
    allocation, tmp_path, code, record, requeued
):
    (tmp_path / "a run/launch").mkdir(parents=True)
    for step in (7, 10):
        (tmp_path / f"a run/checkpoints/step_{step:06d}").mkdir(parents=True)
    if record:
        (tmp_path / "a run/launch/7.restarts").write_text(f"{record}\n")
    process, log = allocation(RUN=f"exit {code}")
    assert process.wait(timeout=deadline(30)) == code
    assert (REQUEUED in lines(log)) == requeued


@pytest.mark.processes
def test_a_run_that_ends_before_its_job_waits_for_it_keeps_its_code(allocation):
    def delayed(script):
        begun = "\n  driver=$!\n"
        assert script.count(begun) == 1
        return script.replace(begun, f"{begun}sleep 0.5\n")

    process, log = allocation(RUN="exit 1", edit=delayed)
    assert process.wait(timeout=deadline(30)) == 1
    assert REQUEUED in lines(log)
