"""Files that people share follow the umask, and what a disk refuses is said with file and space."""

import os
import stat

import pytest
import torch

from rlcore.cli import main
from rlcore.files import replace_file
from rlcore.learner.exporting import write_model
from rlcore.learner.lora import save_adapter
from rlcore.learner.specs import LoraSpec
from rlcore.learner.state_files import Part, StateWriter
from rlcore.models.fresh import build_fresh_model, cut_model
from rlcore.models.specs import FreshModelSpec

SMALL = FreshModelSpec(hidden_size=16, layers=2, intermediate_size=16)


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o002, 0o077])
def test_models_adapters_states_and_files_follow_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        build_fresh_model(tmp_path / "fresh", "01", SMALL, seed=0, max_len=8)
        cut_model(tmp_path / "fresh", tmp_path / "thin", 1)
        weights = {"model.layers.0.lora_A.default.weight": torch.ones(2, 2)}
        save_adapter(tmp_path / "adapter", weights, LoraSpec(), "base")
        (tmp_path / "state").mkdir()
        writer = StateWriter(tmp_path / "state")
        writer.add("weight", Part.whole(torch.ones(2)))
        writer.close([writer.finish()])
        replace_file(tmp_path / "state" / "about.json", "{}")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.suffix == ".safetensors" for path in files) >= 4
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in files}
    assert set(modes.values()) == {0o666 & ~mask}, modes


def test_files_of_another_model_do_not_bring_their_modes_along(tmp_path):
    build_fresh_model(tmp_path / "fresh", "01", SMALL, seed=0, max_len=8)
    for path in (tmp_path / "fresh").iterdir():
        path.chmod(0o400)
    before = os.umask(0o002)
    try:
        cut_model(tmp_path / "fresh", tmp_path / "thin", 1)
        write_model(tmp_path / "out", {"w": torch.ones(1)}, str(tmp_path / "fresh"))
    finally:
        os.umask(before)
    for folder in (tmp_path / "thin", tmp_path / "out"):
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        assert "tokenizer.json" in modes and set(modes.values()) == {0o664}, modes


@pytest.mark.parametrize("name", ["about.json", "config.yaml"])
def test_a_disk_that_is_full_at_the_start_is_said_with_file_and_space(tmp_path, name, capsys):
    (tmp_path / f".{name}.partial").symlink_to("/dev/full")  # where `replace_file` writes
    words = ["experiment=quickstart", "logging.wandb=disabled", "logging.console=off"]
    assert main(["train", *words, f"run_dir={tmp_path}"]) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said and said.count("\n") == 1
    assert f"{tmp_path}/{name} could not be written: No space left on device" in said
    assert "MiB are free" in said
    assert not (tmp_path / "owner.json").exists()
