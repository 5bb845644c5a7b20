"""Wrong commands end with a sentence and exit code 2, before anything is started; several faults
together; variables of the environment."""

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from urllib.request import proxy_bypass

import psutil
import pytest
import ray
from timing import deadline, wait_for_end

import rlcore
from rlcore import cli
from rlcore import cores as machine
from rlcore.agents.endpoint import _tell_clients
from rlcore.cli import main
from rlcore.cluster import ray_cluster
from rlcore.cluster.cpu.kernels import KERNELS
from rlcore.cluster.specs import RaySpec, joined_address
from rlcore.commands.derived import with_stated_threads
from rlcore.commands.dry_run import dry_run
from rlcore.commands.preflight import check_writable
from rlcore.commands.processes import policy_job
from rlcore.commands.train import StopSignals, train
from rlcore.config.compose import load
from rlcore.errors import Faults, UserError
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.tasks.rewards.requests import _proxy

BASE = ("train", "experiment=quickstart", "logging.wandb=disabled")


def _sentence(code, said):
    """The one sentence on stderr of a command that must exit with 2."""
    assert code == 2, said
    assert sum(line.startswith("rlcore: ") for line in said.splitlines()) == 1, said
    text = said[said.index("rlcore: ") :]
    return text if " faults, each to be mended:" in text else text.splitlines()[0]


def _refused_as_installed(*words):
    """The same of a process."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "rlcore"), *words],
        capture_output=True,
        text=True,
        timeout=deadline(120),
    )
    return _sentence(done.returncode, done.stderr)


@pytest.fixture
def refused(capsys):
    """Gives a command's words to `rlcore`, here; its sentence."""
    return lambda *words: _sentence(main(words), capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["learner.lrr=1"], ["learner.lrr", "learner.lr"]),
        (["learner.zero_stage=5"], ["learner.zero_stage", "5", "3"]),
        (["schedule=weekly"], ["schedule", "weekly", "on_policy"]),
        (["task=gsm8k", "task.args.train_path=missing.jsonl"], ["missing.jsonl"]),
        (["model.path=no/such/folder"], ["model.path=/", "no/such/folder"]),
        (["cluster.num_cpus=1"], ["cluster.num_cpus=1", "learner"]),
        (["rollout.top_p=0.9", "rollout.logprobs_k=0"], ["rollout.top_p=0.9"]),
        (["model.max_len=18", "rollout.max_new_tokens=16"], ["model.max_len", "prompt"]),
        (["correction=[tis,mis]"], ["tis", "mis"]),
    ],
)
def test_a_wrong_configuration_is_one_sentence(refused, words, said, tmp_path, monkeypatch):
    monkeypatch.setenv(KERNELS, "AVX2")  # the user's choice: nothing is tried
    sentence = refused(*BASE, f"run_dir={tmp_path / 'run'}", *words)
    assert not [word for word in said if word not in sentence], sentence
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("more", [(), ("dry_run=true",)])
def test_a_taken_port_for_the_metrics_leaves_nothing_behind(refused, more, tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        word = f"logging.prometheus_port={s.getsockname()[1]}"
        sentence = refused(*BASE, f"run_dir={tmp_path / 'run'}", word, *more)
    assert word in sentence and "in use" in sentence
    assert not (tmp_path / "run").exists()


def test_an_empty_data_set_and_a_row_without_an_answer_are_named(refused, tmp_path):
    empty, bad = tmp_path / "empty.jsonl", tmp_path / "bad.jsonl"
    empty.write_text("")
    bad.write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": "2+2?"}\n')
    for path, said in ((empty, "empty"), (bad, "row 2")):
        sentence = refused(
            *BASE,
            f"run_dir={tmp_path / 'run'}",
            "task=gsm8k",
            f"task.args.train_path={path}",
            f"task.args.heldout_path={path}",
        )
        assert str(path) in sentence and said in sentence, sentence


@pytest.mark.slow
@pytest.mark.cluster
def test_a_port_that_is_taken_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("RLCORE_TEST_MARK", str(tmp_path))  # which the run's processes inherit
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        sentence = _refused_as_installed(
            *BASE, f"run_dir={tmp_path / 'run'}", f"learner.port={port}", "model.warmup=null"
        )
        assert f"learner.port={port}" in sentence
    left = [
        p
        for p in psutil.process_iter(["environ"])
        if (p.info["environ"] or {}).get("RLCORE_TEST_MARK") == str(tmp_path)
    ]
    wait_for_end(left, 15)


@pytest.mark.processes
def test_a_run_directory_that_holds_a_run_is_not_overwritten(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert "resume=auto" in _refused_as_installed(*BASE, f"run_dir={tmp_path}")


# Preflight names all faults at once, and a dry run passes nothing that a start refuses.


SMALL = FreshModelSpec(hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=32)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def refusal(command, words):
    with pytest.raises(UserError) as error:
        command(load(words))
    return str(error.value)


def test_one_fault_stays_one_sentence_and_several_are_numbered():
    def refuse(text):
        raise UserError(text)

    faults = Faults()
    assert faults.of(lambda: 3) == 3
    faults.end()
    assert faults.of(lambda: refuse("a=1 is bad.")) is None
    with pytest.raises(UserError, match=r"^a=1 is bad\.$"):
        faults.end()
    faults.of(lambda: refuse("a=1 is bad."))  # the same again
    faults.of(lambda: refuse("b=2 is bad."))
    with pytest.raises(UserError, match=r"2 faults(.|\n)*1\. a=1 is bad\.\n *2\. b=2 is bad\."):
        faults.end()


@pytest.mark.parametrize("command", [dry_run, train])
def test_all_faults_of_a_run_are_named_together(command, tmp_path, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    (tmp_path / "file").write_text("")
    words = ["experiment=quickstart", "run_dir=file/run", "logging.sinks=[tensorboard]"]
    monkeypatch.setattr(importlib.metadata, "version", missing)
    words += ["task=file", "task.args={train_path: none.jsonl, grader: 'none.py:f'}"]
    said = refusal(command, [*words, "model=path", "model.path=nowhere", "logging.wandb=disabled"])
    assert int(said.split()[0]) == 5 and said.count("each to be mended") == 1
    for fault in ("tensorboard", "none.py", "none.jsonl", "model.path=", "run_dir="):
        assert fault in said
    assert not (tmp_path / "run").exists()


# a fault -> (the word that has it, what names it)
FAULTS = {
    "model": ("model=./nowhere", "model.path="),
    "data": ("data=none.jsonl", "task.args.train_path="),
    "grader": ("reward=graders.py:none", "task.args.grader="),
    "run_dir": ("run_dir=file/run", "run_dir="),
    "package": ("logging.sinks=[tensorboard]", "logging.sinks=tensorboard"),
    "range": ("learner.lr=-1", "learner.lr=-1"),
    "correction": ("correction=tsi", "correction=tsi"),
    "key": ("foo=3", "foo=3"),
    "memory": ("cluster.object_store_mib=1", "cluster.object_store_mib=1"),
}
RIGHT = {
    "model": "model=./model",
    "data": "data=rows.jsonl",
    "grader": "reward=graders.py:grade",
    "run_dir": "run_dir=run",
}
# A model that is not there has no size.
PAIRS = [pair for pair in combinations(FAULTS, 2) if {*pair} != {"model", "memory"}]


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    spec = SMALL.model_copy(update={"vocab_size": 8192, "hidden_size": 128})
    build_fresh_model("model", "0123456789=+", spec, seed=0, max_len=4096)
    rows = ({"question": f"{n}+1=", "answer": str(n + 1)} for n in range(100))
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("graders.py").write_text("def grade(item, response):\n    return 1.0\n")
    Path("file").write_text("")

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)


def require(said, wrong):
    """Each of the faults once, and no other."""
    lines = [line.strip() for line in said.removeprefix("rlcore: ").strip().splitlines()]
    found = [line.split(". ", 1)[1] for line in lines[1:]] if len(wrong) > 1 else lines
    assert len(found) == len(wrong), said
    for name in wrong:
        assert sum(line.startswith(FAULTS[name][1]) for line in found) == 1, said
    assert all(line.endswith(".") for line in found), said


def words_with(wrong):
    right = [word for name, word in RIGHT.items() if name not in wrong]
    return [*right, *(FAULTS[name][0] for name in wrong)]


@pytest.mark.parametrize("wrong", [(), *((name,) for name in FAULTS), *PAIRS], ids="+".join)
def test_a_dry_run_of_three_words_names_every_fault(wrong, inputs, capsys):
    code = cli.main(["train", *words_with(wrong), "dry_run=true"])
    assert code == (2 if wrong else 0)
    if wrong:
        require(capsys.readouterr().err, wrong)
    assert not Path("run").exists()


COMMANDS = {
    "train": (["train"], set()),
    "dry run": (["train", "dry_run=true"], set()),
    "try": (["try"], {"run_dir", "package", "memory"}),
    "eval": (["eval"], {"memory"}),
}


@pytest.mark.parametrize(("words", "unread"), COMMANDS.values(), ids=list(COMMANDS))
def test_every_command_names_all_of_them(words, unread, inputs, capsys):
    wrong = {*FAULTS} - unread - {"model"}
    given = [word for word in words_with(wrong) if word != "run_dir=run"]
    assert cli.main([*words, *given]) == 2
    said = capsys.readouterr().err.replace("args.heldout_path", "args.train_path")
    require(said[said.index("rlcore: ") :].split("rlcore: ")[-1], wrong)


def test_a_sweep_names_them_once_for_all_its_runs(inputs, capsys):
    words = ["model=path", "model.path=nowhere", "task=file", "task.args.train_path=none.jsonl"]
    words += ["task.args.grader=graders.py:none", "learner.lr=-1", "seed=0,1", "run_dir=file/s"]
    for more in ([], ["dry_run=true"]):
        assert cli.main(["sweep", *words, *more]) == 2
        said = capsys.readouterr().err.replace("run_dir=file/s/seed-0", "run_dir=file/run")
        require(said, {"model", "data", "grader", "run_dir", "range"})


ROWS = "task.args.train_path=rows.jsonl"
OTHERS = {
    "experimnt=quickstart": (["actor.fp8.count=2"], 1),  # all others may follow from it
    "tassk=file": (["model=./model", ROWS], 2),
    "modle=./model": (["task=file", ROWS, "task.args.grader=graders.py:grade"], 2),
}


@pytest.mark.parametrize("word", OTHERS)
def test_a_wrong_group_does_not_make_faults_of_its_keys(word, inputs, capsys):
    words, count = OTHERS[word]
    assert cli.main(["train", word, *words, "learner.lr=-1"]) == 2
    said = capsys.readouterr().err
    assert f"{word} is not a key" in said and ("faults" not in said) == (count == 1)
    assert count == 1 or said.startswith(f"rlcore: {count} faults"), said


def test_python_names_them_together(inputs):
    with pytest.raises(UserError) as error:
        rlcore.train(
            model="nowhere/x",
            data="none.jsonl",
            reward="graders.py:none",
            run_dir="file/run",
            overrides={"learner.lr": -1},
        )
    require(str(error.value), {"model", "data", "grader", "run_dir", "range"})


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("attn_logit_softcapping", 50.0, "attn_logit_softcapping=50"),
        ("logits_scaling", 8.0, "LM head has logits_scaling; choose another model"),
        ("lm_head_multiplier", 0.02, "LM head has lm_head_multiplier; choose another model"),
    ],
)
def test_odd_logits_are_refused_before_anything_starts(tmp_path, setting, value, said):
    build_fresh_model(tmp_path / "model", "0123456789=", SMALL, seed=0, max_len=512)
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {setting: value}))
    words = ["experiment=quickstart", "model=path", "model.path=model", "model.max_len=64"]
    assert said in refusal(dry_run, [*words, "run_dir=run", "logging.wandb=disabled"])


def test_a_folder_is_tried_and_left_as_it_was(tmp_path):
    check_writable("run_dir", str(tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="run_dir=/proc/1/rlcore cannot be written"):
        check_writable("run_dir", "/proc/1/rlcore")  # permissions alone let root


# Environment variables that users have set for other programs, and what a run makes of them
# (docs/using.md).


WORDS = ("train", "experiment=quickstart", "dry_run=true", "run_dir=x")


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
