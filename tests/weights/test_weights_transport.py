"""Transports carry exactly what was announced, bit by bit, or say what is wrong."""

from __future__ import annotations

import itertools
import resource
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load

from rlcore.weights.blob import from_blob, to_blob, write_blob
from rlcore.weights.buckets import DiskTransport, ObjectStoreTransport
from rlcore.weights.manifest import ArrivalError, make_manifest, tensor_checksum
from rlcore.weights.stream import arriving, in_order


def weights(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(3 + i, 5, generator=g).to(dtype) for i in range(4)} | {
        "scalar": torch.tensor(2.5, dtype=dtype),
        "strided": torch.randn(6, 4, generator=g).to(dtype).t(),
    }


class Store:
    """An object store of one process whose memory is read-only, as a real one's is."""

    def __init__(self) -> None:
        self.held: dict[int, np.ndarray] = {}

    def put(self, blob: np.ndarray) -> int:
        blob = blob.copy()
        blob.flags.writeable = False
        self.held[len(self.held)] = blob
        return len(self.held) - 1

    def get(self, handle: int) -> np.ndarray:
        return self.held[handle]


def transports(tmp_path: Path):
    store = Store()
    size = {"bucket_bytes": 100}  # of some of the tensors
    yield (
        ObjectStoreTransport(store.put, None, **size),
        ObjectStoreTransport(None, store.get, **size),
    )
    yield DiskTransport(tmp_path / "weights", **size), DiskTransport(tmp_path / "weights", **size)


def joined(buckets):
    return {name: t for bucket in buckets for name, t in bucket.items()}


def test_what_is_published_is_received(tmp_path):
    for learner, actor in transports(tmp_path):
        for version, dtype in ((1, torch.bfloat16), (2, torch.float32), (3, torch.float16)):
            sent = weights(version, dtype)
            manifest = make_manifest(version, sent, full=True, seed=0)
            got = joined(actor.receive(manifest, learner.publish(manifest, sent.items())))
            assert got.keys() == sent.keys()
            for name, t in sent.items():
                assert got[name].dtype == dtype and torch.equal(got[name], t)


def test_another_versions_manifest_is_refused(tmp_path):
    for learner, actor in transports(tmp_path):
        sent = weights()
        handle = learner.publish(make_manifest(1, sent, full=True, seed=0), sent.items())
        with pytest.raises(ArrivalError, match="extra is missing"):
            larger = {**sent, "extra": torch.ones(2).bfloat16()}
            joined(actor.receive(make_manifest(2, larger, full=True, seed=0), handle))
        with pytest.raises(ArrivalError, match="w0 is missing"):
            learner.publish(
                make_manifest(1, sent, full=True, seed=0),
                ((n, t) for n, t in sent.items() if n != "w0"),
            )


def test_a_blob_is_a_safetensors_file_of_any_mix_of_dtypes(tmp_path):
    sent = weights() | {"a": torch.arange(3), "b": torch.ones(2, 2), "none": torch.empty(0, 4)}
    sent["fp8"] = torch.ones(5).to(torch.float8_e4m3fn)
    with (tmp_path / "w").open("wb") as file:
        write_blob(file, sent)
    blob = to_blob(sent)
    assert (tmp_path / "w").read_bytes() == blob.tobytes()
    for got in (from_blob(blob), load(blob.tobytes())):
        assert got.keys() == sent.keys()
        assert all(tensor_checksum(got[n]) == tensor_checksum(t) for n, t in sent.items())


def longest_silence(work: Callable[[], object]) -> float:
    """The longest time that another thread had no turn while `work` ran, as a share of it, both in
    processor time of this process: others may have the CPU, too."""
    turns: list[float] = []
    done = threading.Event()

    def heartbeat() -> None:
        while not done.wait(0.001):
            turns.append(time.process_time())

    thread = threading.Thread(target=heartbeat)
    thread.start()
    begun = time.process_time()
    work()
    ended = time.process_time()
    done.set()
    thread.join()
    inside = [begun, *(t for t in turns if begun < t < ended), ended]
    return max(b - a for a, b in itertools.pairwise(inside)) / (ended - begun)


def test_making_a_blob_lets_heartbeats_run():
    large = {f"w{i}": torch.ones(16 << 20) for i in range(4)}  # 256 MiB
    assert min(longest_silence(lambda: to_blob(large)) for _ in range(3)) < 0.5


def test_receiving_copies_nothing():
    blob = to_blob(weights())
    received = from_blob(blob)
    start, stop = blob.ctypes.data, blob.ctypes.data + blob.nbytes
    assert all(start <= t.data_ptr() < stop for t in received.values())


def test_a_truncated_blob_is_refused():
    blob = to_blob(weights())
    for end in (4, 40, len(blob) - 1):
        with pytest.raises(ValueError, match="truncated"):
            from_blob(blob[:end])


def test_disk_keeps_the_newest_versions_and_no_half_written_file(tmp_path):
    transport = DiskTransport(tmp_path, bucket_bytes=100, keep=2)
    handles = []
    for version in range(4):
        sent = weights(version)
        manifest = make_manifest(version, sent, full=True, seed=0)
        handles.append(transport.publish(manifest, sent.items()))
    assert sorted(p.name for p in tmp_path.iterdir()) == [Path(h).name for h in handles[2:]]
    with pytest.raises(OSError):
        joined(transport.receive(make_manifest(0, weights(0), full=True, seed=0), handles[0]))


def test_a_publish_that_fails_leaves_the_last_one_whole(tmp_path):
    transport = DiskTransport(tmp_path, bucket_bytes=100)
    sent = weights()
    manifest = make_manifest(1, sent, full=True, seed=0)
    handle = transport.publish(manifest, sent.items())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # the disk takes 64 bytes of the next file, no more
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        with pytest.raises(Exception, match=r"(?i)too large|i/o|os error"):
            transport.publish(make_manifest(2, sent, full=True, seed=0), sent.items())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    assert [str(p) for p in tmp_path.iterdir()] == [handle]
    assert torch.equal(joined(transport.receive(manifest, handle))["w0"], sent["w0"])


class Memory:
    """Counts the bytes of the tensors that it made and that are still referenced."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def made(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.numel() * tensor.element_size()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(tensor.untyped_storage(), self._free, size)
        return tensor

    def _free(self, size: int) -> None:
        self.live -= size


def test_no_more_than_a_bucket_is_in_memory_on_either_side(tmp_path):
    """40 tensors of 1000 bytes in buckets of 4000: the sender has a bucket and the next tensor, the
    receiver a bucket and its copy of it; neither ever has the set."""
    names = [f"w{i}" for i in range(40)]
    made = Memory()
    manifest = make_manifest(1, {n: torch.full((250,), 1.0) for n in names}, full=True, seed=0)
    store = Store()
    size = {"bucket_bytes": 4000}
    for learner, actor in (
        (
            ObjectStoreTransport(store.put, None, **size),
            ObjectStoreTransport(None, store.get, **size),
        ),
        (DiskTransport(tmp_path, **size), DiskTransport(tmp_path, **size)),
    ):
        made.peak = 0
        one_by_one = ((n, made.made(torch.full((250,), 1.0))) for n in names)
        handle = learner.publish(manifest, one_by_one)
        assert 0 < made.peak <= 5000 and made.live == 0
        widths = [sum(t.numel() * 4 for t in b.values()) for b in actor.receive(manifest, handle)]
        assert widths == [4000] * 10


def test_a_set_that_changes_on_the_way_is_refused_where_it_does():
    sent = {f"w{i}": torch.ones(4) for i in range(3)}
    manifest = make_manifest(1, sent, full=True, seed=0)
    for wrong, found in (
        ([("w1", sent["w1"])], "w0 is missing"),
        ([*sent.items(), ("w9", sent["w0"])], "w9 was not announced"),
        ([("w0", torch.ones(5))], r"w0 has shape \(5,\)"),
        ([("w0", torch.ones(4).half())], "w0 is float16"),
    ):
        with pytest.raises(ArrivalError, match=found):
            list(in_order(manifest, wrong))
    for buckets, found in (
        ([sent, {"w0": sent["w0"]}], "came twice"),
        ([{"w0": sent["w0"]}], r"w1 is missing \(and 1 more\)"),
    ):
        with pytest.raises(ArrivalError, match=found):
            list(arriving(manifest, buckets))
