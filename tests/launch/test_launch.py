"""What the launchers would start: valid and complete."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlcore.config.compose import load
from rlcore.errors import StageError, UserError
from rlcore.launch.job import launch, render
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
    assert "#SBATCH --partition=gpu" in shown and "rlcore.launch.node" in shown
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


def test_an_array_is_refused_for_a_sweep():
    with pytest.raises(UserError, match=r"sbatch\.array=0-3 is not accepted.*rlcore sweep"):
        LaunchSpec(kind="slurm", sbatch={"array": "0-3"}).check("cluster.launch")
    with pytest.raises(UserError, match="rlcore sweep"):
        LaunchSpec(kind="slurm", learner_sbatch={"array": "0-3"}).check("cluster.launch")


def test_numbers_are_accepted_where_text_is_meant(tmp_path):
    given = {"env": {"OMP_NUM_THREADS": 2}, "sbatch": {"nice": 10, "time": "60"}}
    text = render(LaunchSpec(kind="slurm", **given), [], f"{tmp_path}/run").text()
    assert "#SBATCH --nice=10\n#SBATCH --time=60\n" in text and "OMP_NUM_THREADS=2\n" in text


def test_a_time_is_written_in_quotes(tmp_path):
    """YAML reads it as a number of seconds, and Slurm would take that for minutes."""
    file = tmp_path / "cluster/mine.yaml"
    file.parent.mkdir()
    words = ["experiment=quickstart", f"run_dir={tmp_path}/run", "cluster=mine"]
    text = "# Mine.\ndefaults: [slurm]\nlaunch:\n  sbatch:\n    time: {}\n"
    file.write_text(text.format("24:00:00"))
    with pytest.raises(UserError, match=r"time=86400 is not accepted: .*write it in quotes"):
        load(words, tmp_path)
    file.write_text("# By me.\n" + text.format("'24:00:00'"))
    assert load(words, tmp_path).cluster.launch.sbatch == {"time": "24:00:00"}


@pytest.mark.parametrize(
    ("sbatch", "said"),
    [
        ({"hetjob": ""}, r"sbatch\.hetjob is not accepted: .*learner_nodes=1 with "),
        ({"nodes": "9"}, r"sbatch\.nodes is what rlcore gives .*: set cluster\.launch\.nodes\."),
        ({"output": "x"}, r"sbatch\.output is what rlcore gives .*: leave it out\."),
        ({"comment": "a\ntouch x"}, "cannot be written to the script"),
        ({"comment\ntouch": "x"}, "cannot be written to the script"),
    ],
)
def test_options_that_sbatch_cannot_have_from_a_user_are_refused(sbatch, said):
    with pytest.raises(UserError, match=said):
        LaunchSpec(kind="slurm", sbatch=sbatch).check("cluster.launch")


def test_a_mount_has_two_absolute_paths():
    wrong = LaunchSpec(kind="slurm", container_image="i", container_mounts=["/a"])
    with pytest.raises(UserError, match=r"container_mounts=/a is not accepted"):
        wrong.check("cluster.launch")


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
    code = f"import sys, rlcore.launch.job; sys.exit({heavy})"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_images_copy_what_the_install_script_reads(profile):
    text = (ROOT / f"docker/{profile}.Dockerfile").read_text()
    assert f"bash requirements/install.sh {profile}" in text
    before = text.split("bash requirements/install.sh")[0]
    assert " wget " in before  # which KubeRay's probes call
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
