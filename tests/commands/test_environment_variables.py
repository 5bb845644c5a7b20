"""Environment variables that users have set for other programs, and what a run makes of them
(docs/using.md)."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from urllib.request import proxy_bypass

import pytest
import ray
from timing import deadline

from rlcore import cores as machine
from rlcore.agents.endpoint import _tell_clients
from rlcore.cli import main
from rlcore.cluster import ray_cluster
from rlcore.cluster.specs import RaySpec, joined_address
from rlcore.commands.derived import with_stated_threads
from rlcore.commands.processes import policy_job
from rlcore.commands.train import StopSignals
from rlcore.config.compose import load
from rlcore.tasks.rewards.requests import _proxy

WORDS = ("train", "experiment=quickstart", "dry_run=true", "run_dir=x")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def said(capsys, *words):
    code = main([*WORDS, *words])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


@pytest.mark.parametrize(
    ("variable", "key", "joined"),
    [
        (None, None, None),
        ("", None, None),
        ("local", None, None),
        ("http://127.0.0.1:8265", None, None),
        ("https://head.example:8265", None, None),
        ("10.0.0.1:6379", None, "10.0.0.1:6379"),
        ("10.0.0.1:6379", "local", None),
        ("http://127.0.0.1:8265", "10.0.0.2:6379", "10.0.0.2:6379"),
        ("auto", None, "auto"),
        ("ray://10.0.0.1:10001", None, "ray://10.0.0.1:10001"),
    ],
)
def test_which_cluster_a_run_joins(monkeypatch, variable, key, joined):
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    assert joined_address(key) == joined
    assert RaySpec(address=key).address == key


def test_the_address_of_a_job_server_does_not_block_a_local_run(monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    for words in ((), ("cluster.address=null",), ("cluster.address=local",)):
        code, shown = said(capsys, *words)
        assert code == 0 and "a cluster of this machine" in shown


def test_a_dead_cluster_in_the_environment_is_named_and_its_remedy_works(monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    code, shown = said(capsys)
    assert code == 2 and "cluster.address=null (RAY_ADDRESS=127.0.0.1:1) does not answer" in shown
    assert "set cluster.address=local" in shown
    assert said(capsys, "cluster.address=local")[0] == 0


def test_hidden_gpus_are_gpus_that_are_not_there(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, shown = said(capsys, "learner.num_gpus=1", "learner.zero_stage=1")
    assert code == 2 and "GPUs where this machine shows 0" in shown


@pytest.mark.parametrize(
    "variables",
    [
        {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NNODES": "2"},
        {"WANDB_MODE": "online", "WANDB_PROJECT": "other", "WANDB_RUN_ID": "abc"},
        {"OMP_NUM_THREADS": "64"},
        {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_USE_V1": "0"},
        {"http_proxy": "http://127.0.0.1:1", "HTTPS_PROXY": "http://127.0.0.1:1"},
    ],
    ids=lambda variables: next(iter(variables)),
)
def test_a_dry_run_is_the_same_with_variables_of_other_programs(monkeypatch, capsys, variables):
    plain = said(capsys)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert said(capsys) == plain and plain[0] == 0


def test_an_engine_has_the_settings_of_vllm_that_it_needs_and_others_are_the_user_s():
    needed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    own = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_ATTENTION_BACKEND": "X"}
    names = [*needed, *own]
    code = f"import os, rlcore.rollout.engines.vllm\nprint([os.environ[n] for n in {names}])"
    theirs = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | theirs | own | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=deadline(60),
    )
    assert done.stdout.strip() == str([*needed.values(), *own.values()]), done.stderr


@pytest.mark.parametrize(
    ("value", "found"),
    [("2", 2), (" 3 ", 3), ("64", 8), ("4,2", 4), ("4, 2,1", 4), ("", 8), ("0", 8), ("x", 8)],
)
def test_threads_that_the_user_asked_for_bound_those_of_a_synchronous_learner(
    value, found, monkeypatch
):
    monkeypatch.setattr(machine, "cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    config = load(["run_dir=x", "schedule=on_policy", "learner.num_gpus=0"])
    assert machine.asked_cores() == found
    stated = with_stated_threads(config)
    assert stated.learner.max_threads == found
    assert policy_job(stated, "model", 0).threads == found


def test_of_a_slurm_job_s_variables_a_run_reads_that_it_is_one(monkeypatch):
    """Its cores are those that Slurm binds it to, its nodes those of `cluster.address`; SIGTERM
    gives it the grace time of a preempted job."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    cores = machine.cores()
    clock = iter([0.0, 60.0, 0.0, 60.0])
    plain = StopSignals(lambda: next(clock))
    assert [plain.repeated(), plain.repeated()] == [False, False]  # the second ends it at once
    numbers = {"JOB_ID": "7", "CPUS_PER_TASK": "64", "NTASKS": "4", "NNODES": "2", "PROCID": "3"}
    for name, value in numbers.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    job = StopSignals(lambda: next(clock))
    assert [job.repeated(), job.repeated()] == [False, True]  # the second waits for the step
    assert machine.cores() == cores and joined_address(None) is None


def test_proxies_are_for_other_machines(monkeypatch):
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://proxy.example:3128")
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "inside.example")
    for host in ("127.0.0.1", "localhost", "[::1]", "127.1.2.3", "a.inside.example"):
        assert _proxy(f"http://{host}:8000/grade") is None
    for url in ("http://h.example/grade", "https://128.0.0.1/grade"):
        assert _proxy(url) == "http://proxy.example:3128"
    # the programs of an endpoint find the way to it
    server = SimpleNamespace(base_url="http://10.9.8.7:5/v1", api_key="k", host="10.9.8.7")
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "")
    _tell_clients(server)
    assert proxy_bypass("10.9.8.7") and proxy_bypass("a.inside.example")
    assert not proxy_bypass("10.9.8.8")


@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
def test_a_folder_of_temporary_files_that_ray_cannot_use_is_refused(
    name, tmp_path, monkeypatch, capsys
):
    longest = tmp_path / ("x" * 100)
    longest.mkdir()
    file = tmp_path / "file"
    file.write_text("")
    for folder, why in ((longest, "at most 39 characters"), (file, "can be written to")):
        if why != "at most 39 characters":
            monkeypatch.setattr(ray_cluster, "_MOST", 1000)
        monkeypatch.setenv(name, str(folder))
        code, shown = said(capsys)
        assert code == 2 and f"{name}={folder}" in shown and why in shown
        assert "set RAY_TMPDIR=/tmp" in shown
        monkeypatch.setenv("RAY_TMPDIR", "/tmp")  # the remedy
        assert said(capsys)[0] == 0
        monkeypatch.delenv("RAY_TMPDIR")


@pytest.mark.cluster
def test_a_folder_with_spaces_and_of_the_most_characters_is_used(monkeypatch):
    """The limit is that of Ray's own paths."""
    with tempfile.TemporaryDirectory(prefix="a b", dir="/tmp") as folder:
        full = Path(folder) / ("y" * (ray_cluster._MOST - len(folder) - 1))
        full.mkdir()
        assert len(str(full)) == ray_cluster._MOST
        monkeypatch.setenv("RAY_TMPDIR", str(full))
        with ray_cluster.cluster(RaySpec(address="local"), needed_cpus=1, needed_gpus=0):
            assert ray.is_initialized() and list(full.rglob("plasma_store"))
