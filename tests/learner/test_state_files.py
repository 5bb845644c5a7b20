import json

import numpy as np
import pytest
import torch

from rlcore.errors import StageError
from rlcore.learner import state_files
from rlcore.learner.state_files import (
    INDEX,
    HeldTensor,
    Part,
    StateWriter,
    join_state,
    open_state,
    read_index,
)


def _write(folder, tensors, world, **facts):
    """As `world` ranks that divide every tensor evenly."""
    listings = []
    for rank in range(world):
        writer = StateWriter(folder, rank=rank)
        for name, tensor in tensors.items():
            start, stop = (tensor.numel() * r // world for r in (rank, rank + 1))
            part = Part(start, tuple(tensor.shape), tensor.flatten()[start:stop])
            writer.add(name, part)
        listings.append(writer.finish())
    writer.close(listings, **facts)


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("shape", [(12,), (4, 3), (2, 3, 2), (1, 12)])
def test_any_part_of_a_stored_tensor_is_that_of_the_tensor(tmp_path, shape, world):
    tensor = torch.arange(12.0).reshape(shape)
    _write(tmp_path, {"w": tensor}, world)
    with open_state(tmp_path) as state:
        assert list(state) == ["w"] and state["w"].shape == shape
        for start in range(12):
            for stop in range(start, 13):
                for one in (state["w"], HeldTensor(tensor)):
                    found = one.part(start, stop).tolist()
                    assert found == list(np.arange(12.0)[start:stop]), (start, stop)
        assert torch.equal(state["w"].whole(), tensor)


def test_files_are_bounded_and_join_to_whole_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr(state_files, "SHARD_BYTES", 64)
    tensors = {f"w{i}": torch.randn(7, 3) for i in range(6)} | {"scalar": torch.tensor(2.0)}
    _write(tmp_path / "parts", tensors, 3, optimizer_steps=4)
    assert len(read_index(tmp_path / "parts")["files"]) > 3
    join_state(tmp_path / "parts", tmp_path / "whole")
    index = read_index(tmp_path / "whole")
    assert index["optimizer_steps"] == 4
    assert all(start == 0 for held in index["files"].values() for start, _ in held.values())
    for folder in ("parts", "whole"):
        with open_state(tmp_path / folder) as state:
            assert state.keys() == tensors.keys()
            assert all(torch.equal(state[n].whole(), t) for n, t in tensors.items())


def test_a_state_that_lacks_a_rank_is_refused(tmp_path):
    _write(tmp_path, {"w": torch.arange(12.0)}, 3)
    index = json.loads((tmp_path / INDEX).read_text())
    lost = index["files"].pop("learner-00001-00000.safetensors")
    assert lost == {"w": [4, 8]}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(StageError, match="lacks entries of w from 4 on"), open_state(tmp_path):
        pass
    (tmp_path / INDEX).write_text(json.dumps({"shards": [], "optimizer_steps": 1}))
    with pytest.raises(StageError, match="an earlier version"), open_state(tmp_path):
        pass


def test_nothing_touches_the_disk_but_what_was_scheduled(tmp_path):
    jobs = []
    writer = StateWriter(tmp_path / "state", jobs.append)
    writer.add("w", Part.whole(torch.ones(3)))
    writer.close([writer.finish()], optimizer_steps=1)
    assert not (tmp_path / "state").exists() and len(jobs) == 3  # folder, tensors, index
    for job in jobs:
        job()
    with open_state(tmp_path / "state") as state:
        assert list(state) == ["w"]
