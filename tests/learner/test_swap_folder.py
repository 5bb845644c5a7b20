"""Folders of states on NVMe: one for each process, removed when their process has ended."""

import pytest
import torch

from rlcore.errors import UserError
from rlcore.learner.engines import zero_state


@pytest.mark.parametrize(
    "cards, ok",
    [("9.0a", False), ("8.0 10.0f", False), ("Hopper", False), ("8.0;9.0+PTX", True), ("", True)],
)
def test_cards_that_deepspeed_cannot_compile_for_are_refused(tmp_path, monkeypatch, cards, ok):
    builders = pytest.importorskip("deepspeed.ops.op_builder")
    monkeypatch.setattr(builders.AsyncIOBuilder, "is_compatible", lambda self: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", cards)
    if ok:
        assert zero_state.swap_folder(tmp_path / "disk")
    else:
        with pytest.raises(UserError, match=f"TORCH_CUDA_ARCH_LIST={cards} cannot be combined"):
            zero_state.swap_folder(tmp_path / "disk")


def test_folders_of_processes_that_ended_are_removed_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(zero_state, "_refuse_without_aio", lambda: None)
    parent = tmp_path / "disk"
    first = zero_state.swap_folder(parent)
    ended, other, beginning = (
        parent / name for name in ("rlcore-swap-ended", "models", "rlcore-swap-new")
    )
    for folder in (ended, other, beginning):
        folder.mkdir()
        (folder / "states").touch()
    (ended / "in_use").touch()  # its lock was undone with its process
    second = zero_state.swap_folder(parent)
    left = {str(folder) for folder in parent.iterdir()}
    assert first != second and left == {first, second, str(other), str(beginning)}
