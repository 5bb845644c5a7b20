"""Preflight names all faults at once, and a dry run passes nothing that a start refuses."""

import importlib.metadata
import json
from itertools import combinations
from pathlib import Path

import pytest

import rlcore
from rlcore import cli
from rlcore.commands.dry_run import dry_run
from rlcore.commands.preflight import check_writable
from rlcore.commands.train import train
from rlcore.config.compose import load
from rlcore.errors import Faults, UserError
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec

SMALL = FreshModelSpec(hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=32)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refused(command, words):
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
    said = refused(command, [*words, "model=path", "model.path=nowhere", "logging.wandb=disabled"])
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
    assert said in refused(dry_run, [*words, "run_dir=run", "logging.wandb=disabled"])


def test_a_folder_is_tried_and_left_as_it_was(tmp_path):
    check_writable("run_dir", str(tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="run_dir=/proc/1/rlcore cannot be written"):
        check_writable("run_dir", "/proc/1/rlcore")  # permissions alone let root
