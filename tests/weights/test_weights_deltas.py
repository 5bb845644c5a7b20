"""Patches carry exactly what has changed, and whoever was away catches up."""

import numpy as np
import pytest
import torch

from rlcore.types import WeightManifest
from rlcore.weights.deltas import DeltaTransport, changed_entries
from rlcore.weights.manifest import ArrivalError, make_manifest
from rlcore.weights.sending import changed_share, sent_bytes


class Store:
    """An object store of one process."""

    def __init__(self):
        self.held = {}

    def put(self, blob: np.ndarray) -> int:
        self.held[len(self.held)] = blob.copy()
        self.held[len(self.held) - 1].flags.writeable = False
        return len(self.held) - 1

    def get(self, handle: int) -> np.ndarray:
        return self.held[handle]


def weights() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    made = {f"w{i}": torch.randn(40 + i, 25, generator=g).bfloat16() for i in range(3)}
    return made | {"scalar": torch.tensor(2.5).bfloat16(), "strided": torch.randn(6, 4).bfloat16()}


def stepped(tensors, share: float, seed: int) -> dict[str, torch.Tensor]:
    """The same with about `share` of the entries one bit larger."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for name, tensor in tensors.items():
        bits = tensor.contiguous().view(torch.int16).clone()
        out[name] = (bits + (torch.rand(bits.shape, generator=g) < share)).view(torch.bfloat16)
    return out


def received(end: DeltaTransport, manifest: WeightManifest, handle) -> dict[str, torch.Tensor]:
    return {n: t for bucket in end.receive(manifest, handle) for n, t in bucket.items()}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[n].contiguous().view(torch.int16), b[n].contiguous().view(torch.int16))
        for n in a
    )


@pytest.mark.parametrize("bucket_bytes", [60, 10_000])
def test_every_version_arrives_to_the_bit_wherever_a_receiver_begins(bucket_bytes):
    store = Store()
    size = {"bucket_bytes": bucket_bytes, "full_weights_every": 4}
    sender = DeltaTransport(store.put, None, **size)
    always, sometimes = (DeltaTransport(None, store.get, **size) for _ in range(2))
    tensors = {**weights(), "strided": weights()["strided"].t()}
    took = []
    for version in range(10):
        manifest = make_manifest(version, tensors, full=True, seed=0)
        handle = sender.publish(manifest, tensors.items())
        took.append((sent_bytes(manifest, handle), changed_share([(manifest, handle)])))
        assert same(received(always, manifest, handle), tensors)
        if version in (2, 3, 7):  # passes over versions, and over whole sets
            assert same(received(sometimes, manifest, handle), tensors)
        late = DeltaTransport(None, store.get, **size)
        assert same(received(late, manifest, handle), tensors)
        tensors = stepped(tensors, 0.02, seed=version)
    whole = [version for version, (_, share) in enumerate(took) if share == 1.0]
    assert whole == [0, 4, 8]
    assert all(0.01 < took[v][1] < 0.03 for v in range(10) if v not in whole)
    if bucket_bytes > 1000:
        assert took[1][0] < 0.15 * took[0][0]


def test_what_changed_is_found_by_bits():
    before = torch.tensor([0.0, 1.0, float("nan"), 2.0])
    after = torch.tensor([-0.0, 1.0, float("nan"), 3.0])
    assert changed_entries(before, after).tolist() == [0, 3]


def test_a_tensor_that_changed_much_travels_whole_and_one_that_did_not_not_at_all():
    store = Store()
    sender = DeltaTransport(store.put, None, bucket_bytes=1 << 20, full_weights_every=9)
    receiver = DeltaTransport(None, store.get, bucket_bytes=1 << 20, full_weights_every=9)
    tensors = weights()
    manifest = make_manifest(0, tensors, full=True, seed=0)
    received(receiver, manifest, sender.publish(manifest, tensors.items()))
    for version, change in ((1, {}), (2, {"w1": -tensors["w1"]})):
        tensors = tensors | change
        manifest = make_manifest(version, tensors, full=True, seed=0)
        handle = sender.publish(manifest, tensors.items())
        assert same(received(receiver, manifest, handle), tensors)
        size = sum(t.nbytes for t in change.values())
        assert size <= handle.sent.bytes <= (size and size + 200)
        assert handle.sent.changed == sum(t.numel() for t in change.values())


def test_a_publication_that_failed_is_followed_by_a_whole_one():
    store = Store()
    sender = DeltaTransport(store.put, None, bucket_bytes=1 << 20, full_weights_every=9)
    tensors = weights()
    manifest = make_manifest(0, tensors, full=True, seed=0)
    assert not sender.publish(manifest, tensors.items()).patches
    with pytest.raises(ArrivalError):
        sender.publish(manifest, list(tensors.items())[:2])
    handle = sender.publish(manifest, tensors.items())
    assert not handle.patches
    receiver = DeltaTransport(None, store.get, bucket_bytes=1 << 20, full_weights_every=9)
    assert same(received(receiver, manifest, handle), tensors)


def test_a_patch_that_does_not_fit_is_refused_and_the_next_set_is_taken_whole():
    store = Store()
    sender = DeltaTransport(store.put, None, bucket_bytes=1 << 20, full_weights_every=9)
    receiver = DeltaTransport(None, store.get, bucket_bytes=1 << 20, full_weights_every=9)
    tensors = weights()
    manifest = make_manifest(0, tensors, full=True, seed=0)
    received(receiver, manifest, sender.publish(manifest, tensors.items()))
    tensors = stepped(tensors, 0.05, seed=1)
    manifest = make_manifest(1, tensors, full=True, seed=0)
    handle = sender.publish(manifest, tensors.items())
    receiver._held["w0"] = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(ArrivalError, match="w0 does not fit"):
        received(receiver, manifest, handle)
    assert same(received(receiver, manifest, handle), tensors)
