"""Which files of a model folder vLLM's loader reads, in the form that each version unpacks."""

import pytest

from rlcore.models.folder import INDEX_FILE


@pytest.mark.parametrize("version, more", [((0, 26, 0), ()), ((0, 32, 0), (INDEX_FILE,))])
def test_only_the_weights_that_the_folder_names_are_read(tmp_path, monkeypatch, version, more):
    from rlcore.rollout.engines.vllm import worker_side

    for name in ("model.safetensors", "consolidated.safetensors", "pytorch_model.bin"):
        (tmp_path / name).touch()
    monkeypatch.setattr(worker_side, "__version_tuple__", version)
    loader = object.__new__(worker_side.FolderLoader)
    found = loader._prepare_weights(str(tmp_path), None, None, False, None)
    assert found == (str(tmp_path), [str(tmp_path / "model.safetensors")], True, *more)
