import numpy as np
import pytest
import torch

from rlcore.learner.state_files import HeldTensor, StateWriter, stored


@pytest.mark.parametrize("shape", [(12,), (4, 3), (2, 3, 2), (1, 12)])
def test_any_part_of_a_stored_tensor_is_that_of_the_tensor(tmp_path, shape):
    tensor = torch.arange(12.0).reshape(shape)
    writer = StateWriter(tmp_path)
    writer.add("w", tensor)
    writer.close()
    for name, source in stored(tmp_path):
        assert name == "w" and source.shape == shape
        for start in range(12):
            for stop in range(start, 13):
                for one in (source, HeldTensor(tensor)):
                    found = one.part(start, stop).tolist()
                    assert found == list(np.arange(12.0)[start:stop]), (start, stop)
        assert torch.equal(source.whole(), tensor)


def test_nothing_touches_the_disk_but_what_was_scheduled(tmp_path):
    jobs = []
    writer = StateWriter(tmp_path / "state", jobs.append)
    writer.add("w", torch.ones(3))
    writer.close(optimizer_steps=1)
    assert not (tmp_path / "state").exists() and len(jobs) == 3  # folder, tensors, index
    for job in jobs:
        job()
    assert [name for name, _ in stored(tmp_path / "state")] == ["w"]
