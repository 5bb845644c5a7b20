"""Transports carry exactly what was announced, bit by bit, or say what is wrong."""

from __future__ import annotations

import itertools
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load

from rlcore.weights.blob import from_blob, to_blob, write_blob
from rlcore.weights.checksum import tensor_checksum
from rlcore.weights.disk import DiskTransport
from rlcore.weights.manifest import ArrivalError, make_manifest
from rlcore.weights.object_store import ObjectStoreTransport


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
    yield ObjectStoreTransport(store.put, None), ObjectStoreTransport(None, store.get)
    yield DiskTransport(tmp_path / "weights"), DiskTransport(tmp_path / "weights")


def test_what_is_published_is_received(tmp_path):
    for learner, actor in transports(tmp_path):
        for version, dtype in ((1, torch.bfloat16), (2, torch.float32), (3, torch.float16)):
            sent = weights(version, dtype)
            manifest = make_manifest(version, sent, full=True, seed=0)
            got = actor.receive(manifest, learner.publish(manifest, sent))
            assert got.keys() == sent.keys()
            for name, t in sent.items():
                assert got[name].dtype == dtype and torch.equal(got[name], t)


def test_another_versions_manifest_is_refused(tmp_path):
    for learner, actor in transports(tmp_path):
        sent = weights()
        handle = learner.publish(make_manifest(1, sent, full=True, seed=0), sent)
        with pytest.raises(ArrivalError, match="extra is missing"):
            actor.receive(
                make_manifest(2, {**sent, "extra": torch.ones(2).bfloat16()}, full=True, seed=0),
                handle,
            )
        with pytest.raises(ArrivalError, match="w0 is missing"):
            learner.publish(
                make_manifest(1, sent, full=True, seed=0),
                {n: t for n, t in sent.items() if n != "w0"},
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
    """The longest time that another thread had no turn while `work` ran, as a share of it."""
    turns: list[float] = []
    done = threading.Event()

    def heartbeat() -> None:
        while not done.wait(0.001):
            turns.append(time.monotonic())

    thread = threading.Thread(target=heartbeat)
    thread.start()
    begun = time.monotonic()
    work()
    ended = time.monotonic()
    done.set()
    thread.join()
    inside = [begun, *(t for t in turns if begun < t < ended), ended]
    return max(b - a for a, b in itertools.pairwise(inside)) / (ended - begun)


def test_making_a_blob_lets_heartbeats_run():
    large = {f"w{i}": torch.ones(16 << 20) for i in range(4)}  # 256 MiB
    # the best of three, since other processes may have the CPU too
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
    transport = DiskTransport(tmp_path, keep=2)
    handles = []
    for version in range(4):
        sent = weights(version)
        handles.append(transport.publish(make_manifest(version, sent, full=True, seed=0), sent))
    assert sorted(p.name for p in tmp_path.iterdir()) == [Path(h).name for h in handles[2:]]
    with pytest.raises(OSError):
        transport.receive(make_manifest(0, weights(0), full=True, seed=0), handles[0])


def test_a_publish_that_fails_leaves_the_last_one_whole(tmp_path):
    transport = DiskTransport(tmp_path)
    sent = weights()
    manifest = make_manifest(1, sent, full=True, seed=0)
    handle = transport.publish(manifest, sent)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # the disk takes 64 bytes of the next file, no more
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        with pytest.raises(Exception, match=r"(?i)too large|i/o|os error"):
            transport.publish(make_manifest(2, sent, full=True, seed=0), sent)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    assert [str(p) for p in tmp_path.iterdir()] == [handle]
    assert torch.equal(transport.receive(manifest, handle)["w0"], sent["w0"])
