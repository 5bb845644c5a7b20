"""Preflight names all faults at once, and a dry run passes nothing that a start refuses."""

import importlib.metadata
import json

import pytest

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
    assert 4 <= int(said.split()[0]) <= 5 and said.count("each to be mended") == 1
    for fault in ("needs the package tensorboard", "none.py", "model.path=", "run_dir="):
        assert fault in said
    assert not (tmp_path / "run").exists()


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
