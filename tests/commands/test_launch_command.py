"""`rlcore launch`: the command around the launchers, its checks, and where roles would be."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from rlcore.cli import main
from rlcore.commands.launching import limit_s
from rlcore.commands.node_places import check_idle, placed, roles
from rlcore.config.compose import load
from rlcore.errors import UserError
from rlcore.launch import jobs

WORDS = ["launch", "experiment=quickstart", "run_dir=runs/there"]
SLURM = ["cluster=slurm", "cluster.launch.nodes=3", "cluster.launch.learner_nodes=1"]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A function that puts stand-ins of Slurm's programs on PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")

    def put(**programs):
        for name, body in programs.items():
            path = tmp_path / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!/usr/bin/env bash\n{body}\n")
            path.chmod(0o755)

    put(sbatch="exit 0", scontrol="exit 0", scancel='echo "$*" >> scancelled')
    return put


def test_a_dry_run_prints_what_would_be_started_and_writes_nothing(tmp_path, slurm, capsys):
    slurm(sbatch='echo "sbatch: Job 7 to start at noon" >&2')
    before = sorted(tmp_path.iterdir())
    assert main([*WORDS, *SLURM, "dry_run=true"]) == 0
    printed, said = capsys.readouterr()
    assert (
        "#SBATCH --nodes=3" in printed
        and "rlcore train experiment=quickstart run_dir=runs/there" in printed
    )
    assert "dry_run=" not in printed and "rlcore_learner" in printed
    assert "node 1: 1 x learner rank" in said and "Job 7 to start at noon" in said
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dry_run=perhaps"], "dry_run=perhaps"),
        (["cluster=slurm", "cluster.launch.learner_nodes=1"], "leaves no node"),
        (["cluster=slurm", "model=path", "model.path=/nonexistent"], "model.path=/nonexistent"),
        ([*SLURM, "actor.bf16.count=100"], "x actor.bf16"),
        ([*SLURM, "cluster.launch.gpus_per_node=8"], "0 of the 24 GPUs"),
        ([*SLURM, "+cluster.launch.sbatch={time: '4'}"], "sbatch.time=4 is not more than"),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence(words, said, slurm, capsys):
    assert main([*WORDS, "dry_run=true", *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


def test_what_slurm_refuses_is_not_submitted(slurm, capsys):
    slurm(sbatch='echo "sbatch: error: invalid partition specified: x" >&2; exit 1')
    assert main([*WORDS, *SLURM]) == 1
    assert "sbatch does not take the job: error: invalid partition" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_machine_without_a_slurm_says_that_it_was_not_asked(slurm, capsys):
    slurm(sbatch='echo "sbatch: fatal: Could not establish a configuration source" >&2; exit 1')
    assert main([*WORDS, *SLURM, "dry_run=true"]) == 0
    assert "not asked whether Slurm takes the job (fatal: Could not" in capsys.readouterr().err


def test_a_folder_has_one_job_at_a_time_which_is_shown_and_cancelled(slurm, capsys):
    log = "StdOut=/data/runs/there/launch/slurm-42.out"
    shown = (
        f"JobId=42 JobName=a b JobState=$(cat state) Reason=None Restarts=1 NodeList=n[1-3] {log}"
    )
    slurm(
        sbatch='case "$1" in --parsable) echo "42;cluster" ;; esac',
        scontrol=f'echo "{shown} {log}"; echo "JobId=43 JobState=RUNNING StdOut=/home/x/out"',
    )
    Path("state").write_text("RUNNING")
    assert main([*WORDS, *SLURM]) == 0
    assert jobs.kept("runs/there") == ["42"]
    capsys.readouterr()
    assert main([*WORDS, *SLURM]) == 2
    assert "/runs/there has job 42 already (RUNNING)" in capsys.readouterr().err
    assert main(["jobs"]) == 0
    _, line = capsys.readouterr().out.splitlines()
    assert line.split() == ["42", "RUNNING", "None", "n[1-3]", "1", "/data/runs/there"]
    assert main(["cancel", "run_dir=runs/there"]) == 0
    Path("state").write_text("PENDING")
    assert main(["cancel", "run_dir=runs/there"]) == 0
    assert Path("scancelled").read_text() == "--batch --signal=TERM 42\n42\n"
    Path("state").write_text("CANCELLED")
    assert main(["cancel", "run_dir=runs/there"]) == 2
    assert "has no queued or running job" in capsys.readouterr().err
    assert main(["jobs", "run_dir=other"]) == 2
    assert main([*WORDS, *SLURM]) == 0 and jobs.kept("runs/there") == ["42", "42"]


def test_the_parts_of_a_job_are_one_job(slurm, capsys):
    log = "StdOut=/data/runs/there/launch/slurm"
    job, rest = "HetJobId=42", "Reason=None Restarts=1"
    slurm(
        sbatch='case "$1" in --parsable) echo 42 ;; esac',
        scontrol=f"""
        read -r first second < state
        echo "JobId=42 {job} JobState=$first {rest} NodeList=n1 {log}-42.out"
        echo "JobId=43 {job} JobState=$second {rest} NodeList=n[2-3] {log}-43.out"
        """,
    )
    Path("state").write_text("RUNNING RUNNING\n")
    assert main([*WORDS, *SLURM, "cluster.launch.learner_cpus_per_node=9"]) == 0
    capsys.readouterr()
    for words in ([], ["run_dir=runs/there"]):
        assert main(["jobs", *words]) == 0
        _, line = capsys.readouterr().out.splitlines()
        assert line.split() == ["42", "RUNNING", "None", "n1,n[2-3]", "1", "/data/runs/there"]
    assert main(["cancel", "run_dir=runs/there"]) == 0
    Path("state").write_text("FAILED COMPLETING\n")  # not over before all of it is
    assert main([*WORDS, *SLURM]) == 2
    assert "has job 42 already (COMPLETING)" in capsys.readouterr().err
    assert main(["cancel", "run_dir=runs/there"]) == 0
    Path("state").write_text("FAILED CANCELLED\n")
    assert main([*WORDS, *SLURM]) == 0
    assert Path("scancelled").read_text() == "--batch --signal=TERM 42\n42\n"


KUBERNETES = ["cluster=kubernetes", "cluster.launch.image=i", "cluster.launch.claim=c"]
KUBECTL = """
echo "$*" >> asked
case "$1" in get) cat state ;; delete) : > state ;; esac
"""


def test_a_ray_job_that_has_ended_is_deleted_and_one_that_runs_is_not(slurm, capsys):
    slurm(kubectl=KUBECTL)
    launch = ["launch", "experiment=quickstart", "run_dir=/data/run", *KUBERNETES]
    state = Path("state")

    def asked():
        Path("asked").unlink(missing_ok=True)
        code = main(launch)
        return code, [line.split()[0] for line in Path("asked").read_text().splitlines()]

    state.write_text("")
    assert asked() == (0, ["get", "apply"])
    for ended in ("Complete", "Failed"):
        state.write_text(f'{{"status": {{"jobDeploymentStatus": "{ended}"}}}}')
        assert asked() == (0, ["get", "delete", "apply"])
    capsys.readouterr()
    for running in ('{"status": {"jobDeploymentStatus": "Running"}}', "{}"):
        state.write_text(running)
        assert asked() == (2, ["get"])
        said = capsys.readouterr().err
        remedy = re.search("`kubectl (.*)`", said)
        assert "run_dir=/data/run has RayJob rlcore-" in said
        assert subprocess.run(["kubectl", *shlex.split(remedy[1])]).returncode == 0
        assert asked() == (0, ["get", "apply"])
    slurm(kubectl='echo "no cluster" >&2; exit 1')
    assert main(launch) == 1 and "kubectl get: no cluster" in capsys.readouterr().err


def test_the_port_of_metrics_is_named(slurm, capsys):
    launch = ["launch", "experiment=quickstart", "run_dir=/data/run", *KUBERNETES]
    assert main([*launch, "logging.prometheus_port=9470", "dry_run=true"]) == 0
    (job,) = yaml.safe_load_all(capsys.readouterr().out.partition("# command")[0])
    (head,) = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert {"name": "rlcore", "containerPort": 9470} in head["ports"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("4", 240),
        ("4:30", 270),
        ("1:00:00", 3600),
        ("2-3", 183600),
        ("1-0:30", 88200),
        ("0-0:0:9", 9),
        ("UNLIMITED", None),
    ],
)
def test_slurm_s_forms_of_a_time_limit(text, seconds):
    assert limit_s(text) == seconds


def test_what_only_the_job_sees_is_named_and_not_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [
        *("cluster=kubernetes", "cluster.launch.image=i", "cluster.launch.claim=c"),
        *("run_dir=/data/run", "model=path", "model.path=/data/m", "dry_run=true"),
    ]
    assert main(["launch", "experiment=quickstart", *words]) == 0
    said = capsys.readouterr().err
    assert "not checked, since this machine does not see them: model.path=/data/m" in said
    assert "head: " in said


# Where roles would be on the nodes of cluster.launch, and a word on GPUs that none would use.


GPUS = ("actor.bf16.num_gpus=1", "learner.num_gpus=1", "learner.zero_stage=1")


def config(*words):
    return load(["experiment=quickstart", "run_dir=x", "cluster=slurm", *words])


def launch(**keys):
    return [f"cluster.launch.{key}={value}" for key, value in keys.items()]


def test_roles_are_listed_by_node_with_those_of_the_learner_on_its_own():
    words = launch(nodes=3, learner_nodes=1, cpus_per_node=2)
    found = placed(config(*words, "actor.bf16.count=2", "actor.bf16.num_cpus=2"))
    assert [str(machine) for machine in found] == [
        "node 1: 1 x learner rank (1 of 2 CPUs)",
        "node 2: 1 x actor.bf16 (2 of 2 CPUs)",
        "node 3: 1 x actor.bf16 (2 of 2 CPUs)",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [*launch(nodes=1, cpus_per_node=1), "actor.bf16.count=100"],
            r"nodes=1 with cluster\.launch\.cpus_per_node=1 .* all but \d+ x actor\.bf16, each of "
            r"1 CPUs on one node",
        ),
        # enough of all nodes together, of none alone
        (
            [*launch(nodes=3, cpus_per_node=2), "actor.bf16.num_cpus=3"],
            r"all but 1 x actor\.bf16, each of 3 CPUs on one node",
        ),
        (
            [*launch(nodes=2, learner_nodes=1, cpus_per_node=2), "learner.ranks=3"],
            r"all but 1 x learner rank, each of 1 CPUs on one of the learner's node",
        ),
        (
            [
                *launch(nodes=2, learner_nodes=1, cpus_per_node=8, learner_cpus_per_node=2),
                "learner.ranks=3",
            ],
            r"learner_cpus_per_node=2 and .*all but 1 x learner rank, each of 1 CPUs on one of the "
            r"learner's node",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_role(words, said):
    with pytest.raises(UserError, match=said):
        placed(config(*words))


def idle(*words):
    found = config(*words)
    return [*check_idle(found, placed(found))]


@pytest.mark.parametrize(
    ("words", "used", "remedy"),
    [
        (
            launch(nodes=2, gpus_per_node=8),
            "0 of the 16 GPUs",
            "ask for cluster.launch.gpus_per_node=0",
        ),
        (
            [*launch(nodes=1, gpus_per_node=8), *GPUS],
            "2 of the 8 GPUs",
            "set actor.bf16.count=7, or ask for cluster.launch.nodes=1 "
            "cluster.launch.gpus_per_node=2",
        ),
        (
            [*launch(nodes=2, gpus_per_node=4, learner_nodes=1), *GPUS],
            "2 of the 8 GPUs",
            "set actor.bf16.count=4 learner.ranks=4, or ask for cluster.launch.nodes=2 "
            "cluster.launch.gpus_per_node=1",
        ),
        (
            [*launch(nodes=2, gpus_per_node=4, learner_nodes=1, learner_gpus_per_node=2), *GPUS],
            "2 of the 6 GPUs",
            "set actor.bf16.count=4 learner.ranks=2, or ask for cluster.launch.nodes=2 "
            "cluster.launch.learner_gpus_per_node=1 cluster.launch.gpus_per_node=1",
        ),
    ],
    ids=["none", "shared", "own", "unlike"],
)
def test_idle_gpus_are_refused_with_keys_that_would_use_all(words, used, remedy):
    with pytest.raises(UserError) as error:
        idle(*words)
    said = str(error.value)
    assert used in said and f": {remedy}, or cluster.launch.idle_gpus=allow." in said
    (line,) = idle(*words, "cluster.launch.idle_gpus=allow")
    assert line.endswith(f"{remedy} would use all") and used in line
    for part in remedy.split(", or ask for "):
        keys = [word for word in part.split() if "=" in word]
        assert idle(*words, *keys) == []


def test_all_gpus_used_need_no_word():
    assert idle(*launch(nodes=1, gpus_per_node=2), *GPUS) == []


def test_the_head_of_kubernetes_holds_no_gpu():
    words = launch(kind="kubernetes", nodes=2, learner_nodes=1, head_cpus=4)
    found = placed(config(*words))
    assert [machine.name for machine in found] == ["head", "node 1", "node 2"]
    assert sum(len(machine.roles) for machine in found) == len(roles(config(*words)))
