"""What the launchers would start: valid, complete, and (for Slurm) run against stand-ins of a
cluster's programs."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from timing import deadline, wait_until

from rlcore.errors import StageError, UserError
from rlcore.launch import launch, render
from rlcore.launch.specs import LaunchSpec

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["experiment=math_fp8_gpu", "run_dir=/data/a b", "model.path=it's"]


def test_local_and_existing_ray_clusters_are_one_command():
    assert render(LaunchSpec(), WORDS, "a").command == (
        "rlcore",
        "train",
        *WORDS,
        "resume=auto",
    )
    assert render(LaunchSpec(), ["resume=never"], "a").command == (
        "rlcore",
        "train",
        "resume=never",
    )
    submitted = render(LaunchSpec(kind="ray", job_address="http://head:8265"), WORDS, "a").command
    assert submitted[:5] == ("ray", "job", "submit", "--address=http://head:8265", "--")
    assert submitted[5:] == ("rlcore", "train", *WORDS, "resume=auto")


def test_a_dry_run_prints_everything_and_writes_nothing(tmp_path, capsys):
    settings = LaunchSpec(kind="slurm", nodes=2, sbatch={"partition": "gpu"})
    assert launch(settings, WORDS, str(tmp_path / "run"), dry_run=True) == 0
    shown = capsys.readouterr().out
    assert "#SBATCH --partition=gpu" in shown and "ray start --head" in shown
    assert f"sbatch {tmp_path}/run/launch/job.sbatch" in shown
    assert not (tmp_path / "run").exists()


def test_a_missing_program_is_named_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserError, match=r"cluster\.launch\.kind=slurm needs the program 'sbatch'.*dry_run=true"
    ):
        launch(LaunchSpec(kind="slurm"), WORDS, str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("settings", "run_dir", "message"),
    [
        (
            LaunchSpec(kind="slurm", nodes=2, learner_nodes=2),
            "a",
            r"learner_nodes=2 leaves no node of .*nodes=2",
        ),
        (LaunchSpec(kind="kubernetes"), "/data/a", r"cluster\.launch\.image is missing"),
        (
            LaunchSpec(kind="kubernetes", memory_gib_per_node=8, image="i", claim="c"),
            "runs/a",
            r"run_dir=runs/a lies outside cluster\.launch\.mount=/data",
        ),
    ],
)
def test_settings_that_do_not_fit_name_their_key(settings, run_dir, message):
    with pytest.raises(UserError, match=message):
        render(settings, WORDS, run_dir)


def test_a_mount_has_two_absolute_paths():
    wrong = LaunchSpec(kind="slurm", container_image="i", container_mounts=["/a"])
    with pytest.raises(UserError, match=r"container_mounts=/a is not accepted"):
        wrong.check("cluster.launch")


# Stand-ins for a cluster's programs. Each writes its arguments to $LOG; `srun` runs its command
# here.
PROGRAMS = {
    "scontrol": """
echo "scontrol $*" >> "$LOG"
if [ "$1" = show ]; then printf "n1\\nn2\\nn3\\n"; fi
""",
    "srun": """
echo "srun $*" >> "$LOG"
while [[ "$1" == --* ]]; do shift; done
exec "$@"
""",
    "ray": """
trap 'echo "ray stopped" >> "$LOG"; exit 0' TERM
echo "auth $RAY_AUTH_MODE ${#RAY_AUTH_TOKEN}" >> "$LOG"
echo "ray $*" >> "$LOG"
while :; do sleep 0.05; done
""",
    "apptainer": """
echo "apptainer $*" >> "$LOG"
while [ "$1" != image.sif ]; do shift; done
shift
exec "$@"
""",
    "python": """
cat > /dev/null
until [ "$(grep -c "^ray start" "$LOG")" = 3 ]; do sleep 0.05; done
echo "python ${*:2}" >> "$LOG"
exit "${JOIN_CODE:-0}"
""",
    "rlcore": """
echo "rlcore $*" >> "$LOG"
for w; do echo "word:$w" >> "$LOG"; done
eval "$RUN"
""",
}


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
        (script, text) = next(iter(render(spec, WORDS, str(tmp_path)).files.items()))
        Path(script).parent.mkdir(exist_ok=True)
        Path(script).write_text(edit(text))
        log = tmp_path / "log"
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "RLCORE_HEAD_IP": "10.0.0.1"}
        slurm["SLURMD_NODENAME"] = "n1"
        env = os.environ | slurm | {"LOG": str(log), "RUN": "exit 0", **environment}
        started.append(subprocess.Popen(["bash", script], env=env, start_new_session=True))
        return started[-1], log

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.processes
@pytest.mark.parametrize(
    "more", [{}, {"nodes": 8, "gpus_per_node": 8, "learner_nodes": 3, "env": {"A": "it's"}}]
)
def test_the_batch_script_is_valid_bash(more):
    (text,) = render(LaunchSpec(kind="slurm", **more), WORDS, "/data/a").files.values()
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.processes
def test_slurm_starts_ray_on_every_node_then_the_run_then_stops_ray(allocation):
    process, log = allocation(RUN='echo "greeting $GREETING" >> "$LOG"; exit 3')
    assert process.wait(timeout=deadline(30)) == 3
    lines = log.read_text().splitlines()
    (head,) = [line for line in lines if line.startswith("ray start --head")]
    workers = [line for line in lines if line.startswith("ray start --address=10.0.0.1:20007")]
    assert (
        '{"rlcore_learner": 1000}' in head
        and "--include-dashboard=false" in head
        and "--num-gpus=8" in head
    )
    assert len(workers) == 2 and all('{"rlcore_actor": 1000}' in line for line in workers)
    assert {"n2", "n3"} == {
        line.split("--nodelist=")[1].split()[0] for line in lines if line.startswith("srun")
    }
    order = [line.split()[0] for line in lines]
    assert order.index("python") < order.index("rlcore") and "python 10.0.0.1:20007 3 600" in lines
    words = [line.removeprefix("word:") for line in lines if line.startswith("word:")]
    again = ["resume=auto", "takeover_after_s=60"]
    assert words == ["train", *WORDS, *again, "cluster.address=10.0.0.1:20007"]
    assert "greeting a 'b' c" in lines and "scontrol requeue 7" not in lines
    assert lines.count("ray stopped") == lines.count("auth token 64") == 3


@pytest.mark.processes
def test_with_pyxis_every_command_is_a_job_step_in_the_image(allocation):
    image = {"container_image": "reg#rlcore:cuda", "container_mounts": ["/data:/data"]}
    process, log = allocation(image, RUN="exit 0")
    assert process.wait(timeout=deadline(30)) == 0
    steps = [line for line in log.read_text().splitlines() if line.startswith("srun")]
    words = "--container-image=reg#rlcore:cuda --container-mounts=/tmp:/tmp,/data:/data"
    assert len(steps) == 5 and all(f"{words} " in step for step in steps)
    # head, the wait for all nodes, and the run share the first node
    first = [step for step in steps if "--overlap" in step and "--nodelist=n1 " in step]
    assert sorted(step.split(f"{words} ")[1].split()[0] for step in first) == [
        *("python", "ray", "rlcore"),
    ]


@pytest.mark.processes
def test_with_apptainer_every_command_is_run_by_it(allocation):
    image = {"container_image": "image.sif", "container_runtime": "apptainer"}
    process, log = allocation(image, RUN="exit 3")
    assert process.wait(timeout=deadline(30)) == 3
    lines = log.read_text().splitlines()
    found = [line for line in lines if line.startswith("apptainer exec --nv image.sif ")]
    assert sorted(line.split()[4] for line in found) == ["python", "ray", "ray", "ray", "rlcore"]


DRIVER = """#!{python}
import sys
import ray
ray.init(address=sys.argv[-1].partition("=")[2], logging_level="ERROR")
print("roles", sorted(r for n in ray.nodes() for r in n["Resources"] if r.startswith("rlcore_")))
sys.exit(5)
"""


@pytest.mark.slow
@pytest.mark.cluster
def test_slurm_with_real_ray_nodes(tmp_path):
    """Two nodes (both on this machine) join under the job's token, the driver sees their roles, Ray
    ends with it."""
    stand_ins = {
        "scontrol": 'printf "n1\\nn2\\n"',
        "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    }
    texts = {name: f"#!/usr/bin/env bash\n{body}\n" for name, body in stand_ins.items()}
    for name, text in (texts | {"rlcore": DRIVER.format(python=sys.executable)}).items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    settings = LaunchSpec(
        kind="slurm",
        nodes=2,
        learner_nodes=1,
        cpus_per_node=1,
        start_timeout_s=120,
        setup=[f'export PATH={tmp_path}:"$PATH"'],
    )
    (text,) = render(settings, WORDS, str(tmp_path)).files.values()
    env = os.environ | {"SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "n[1-2]"}
    done = subprocess.run(
        ["bash"], input=text, text=True, capture_output=True, env=env, timeout=deadline(240)
    )
    assert "roles ['rlcore_actor', 'rlcore_learner']" in done.stdout, done.stderr[-2000:]
    assert done.returncode == 5
    assert not subprocess.run(["pgrep", "-f", "gcs_server.*24242"], capture_output=True).stdout


@pytest.mark.processes
def test_nodes_that_do_not_join_end_the_job_without_a_run(allocation):
    process, log = allocation(JOIN_CODE="1")
    assert process.wait(timeout=deadline(30)) == 1
    assert not [line for line in log.read_text().splitlines() if line.startswith("rlcore")]


@pytest.mark.processes
@pytest.mark.parametrize(("restarts", "requeued"), [("0", True), ("3", False)])
def test_sigterm_reaches_the_run_and_the_job_is_requeued_to_resume(allocation, restarts, requeued):
    waiting = """
trap 'echo checkpoint >> "$LOG"; exit 130' TERM
echo up >> "$LOG"
while :; do sleep 0.05; done
"""
    process, log = allocation(RUN=waiting, SLURM_RESTART_COUNT=restarts)
    wait_until(lambda: log.exists() and "up\n" in log.read_text(), 30, "the run to be up")
    process.terminate()
    assert process.wait(timeout=deadline(30)) == 130
    lines = log.read_text().splitlines()
    assert "checkpoint" in lines and ("scontrol requeue 7" in lines) == requeued


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [("1", "0", True), ("1", "3", False), ("2", "0", False), ("0", "0", False)],
)
def test_a_failed_run_is_tried_again_and_a_wrong_configuration_is_not(
    allocation, code, restarts, requeued
):
    process, log = allocation(RUN=f"exit {code}", SLURM_RESTART_COUNT=restarts)
    assert process.wait(timeout=deadline(30)) == int(code)
    assert ("scontrol requeue 7" in log.read_text().splitlines()) == requeued


@pytest.mark.processes
def test_a_run_that_ends_before_its_job_waits_for_it_keeps_its_code(allocation):
    def delayed(script):
        begun = "\ndriver=$!\n"
        assert script.count(begun) == 1
        return script.replace(begun, f"{begun}sleep 0.5\n")

    process, log = allocation(RUN="exit 1", SLURM_RESTART_COUNT="0", edit=delayed)
    assert process.wait(timeout=deadline(30)) == 1
    assert "scontrol requeue 7" in log.read_text().splitlines()


@pytest.mark.processes
def test_a_refused_job_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(StageError, match="sbatch did not accept the job"):
        launch(LaunchSpec(kind="slurm"), WORDS, str(tmp_path / "run"))
    assert (tmp_path / "run/launch/job.sbatch").exists()


@pytest.mark.processes
def test_launching_imports_neither_ray_nor_torch():
    heavy = "any(m in sys.modules for m in ('ray', 'torch', 'vllm'))"
    code = f"import sys, rlcore.launch; sys.exit({heavy})"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_images_copy_what_the_install_script_reads(profile):
    text = (ROOT / f"docker/{profile}.Dockerfile").read_text()
    assert f"bash requirements/install.sh {profile}" in text
    before = text.split("bash requirements/install.sh")[0]
    for source in ("pyproject.toml", "LICENSE", "requirements", "rlcore/__init__.py"):
        assert source in before and (ROOT / source).exists()
    assert ".venv" in (ROOT / f"docker/{profile}.Dockerfile.dockerignore").read_text().splitlines()


@pytest.mark.processes
@pytest.mark.parametrize("rank", [0, 1])
def test_the_skypilot_task_starts_ray_on_each_node_and_the_run_on_the_first(rank, tmp_path):
    task = yaml.safe_load((ROOT / "launchers/skypilot.yaml").read_text())
    assert set(task) <= {
        *("name", "num_nodes", "workdir", "resources", "volumes", "envs", "secrets"),
        *("setup", "run"),
    }
    for name in ("ray", "rlcore", "python"):
        said = "echo 2" if name == "python" else ""
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/log\n{said}\n')
        (tmp_path / name).chmod(0o755)
    sky = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NUM_NODES": "2",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash"], input=task["run"], text=True, env=os.environ | task["envs"] | sky, cwd=tmp_path
    )
    assert done.returncode == 0
    lines = (tmp_path / "log").read_text().splitlines()
    gpus = "--num-gpus=8 --disable-usage-stats"
    if rank:
        assert lines == [f"ray start --address=10.0.0.1:26379 {gpus} --block"]
        return
    assert lines[0] == f"ray start --head --port=26379 --include-dashboard=false {gpus}"
    assert lines[-1] == "ray stop"
    verb, command, *words = lines[-2].split()
    assert (verb, command) == ("rlcore", "train") and words[-1] == "cluster.address=10.0.0.1:26379"
    assert {"experiment=fp8_4nodes", "resume=auto", "run_dir=/checkpoints/run"} <= set(words)
