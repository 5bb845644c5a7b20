"""A wrong command ends with one sentence and exit code 2, before anything is started."""

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from timing import deadline, wait_for_end

from rlcore.cli import main
from rlcore.cluster.cpu.kernels import KERNELS

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
