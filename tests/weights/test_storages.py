"""Memory that is given away and taken back under the same tensors."""

import pytest
import torch

from rlcore.weights.storages import EmptiedStorages


@pytest.mark.parametrize("keep", [True, False])
def test_views_come_back_with_what_was_kept_or_zeros(keep):
    whole = torch.arange(12, dtype=torch.float32)
    part = whole[4:8].view(2, 2)
    before = part.clone()
    emptied = EmptiedStorages([whole, part], keep=keep)
    assert emptied.size == 48
    assert whole.untyped_storage().nbytes() == 0
    emptied.restore()
    assert torch.equal(part, before if keep else torch.zeros(2, 2))
    part[0, 0] = 7.0
    assert whole[4] == 7.0


def test_host_memory_serves_the_same_storages_again():
    whole, other = torch.arange(12, dtype=torch.float32), torch.ones(3)
    copies = {}
    for value in (1.0, 2.0):
        whole.fill_(value)
        emptied = EmptiedStorages([whole, other], keep=True, copies=copies)
        places = [copy.data_ptr() for copy in copies.values()]
        assert torch.equal(emptied.read(whole), torch.full((12,), value))
        emptied.restore()
        assert torch.equal(whole, torch.full((12,), value)) and torch.equal(other, torch.ones(3))
        assert len(copies) == 2 and places == [copy.data_ptr() for copy in copies.values()]
    longer = torch.cat([whole, whole])
    EmptiedStorages([longer], keep=True, copies=copies).restore()
    assert torch.equal(longer, torch.full((24,), 2.0))
    assert [len(copy) for copy in copies.values()] == [96]  # the other storages' is dropped


def test_a_kept_tensor_is_read_on_the_host_meanwhile():
    whole = torch.arange(12, dtype=torch.bfloat16)
    other = torch.ones(3)
    part = whole[2:10:2]
    expected = part.clone()
    emptied = EmptiedStorages([whole], keep=True)
    assert torch.equal(emptied.read(part), expected)
    assert emptied.read(other) is other
