"""Folders of states on NVMe: one for each process, removed when their process has ended."""

from rlcore.learner.engines import zero_state


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
