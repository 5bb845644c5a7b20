"""What publications and checkpoints hold beside the learner, measured inside rank processes."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner_helpers import ALPHABET, make_groups
from live_bytes import LiveBytes
from rank_jobs import learner
from timing import free_port

from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.types import POLICY, WeightManifest
from rlcore.weights.buckets import DiskTransport, ObjectStoreTransport
from rlcore.weights.group import BroadcastGroup, Rendezvous
from rlcore.weights.manifest import announce

BUCKET = 1 << 17
SHAPE = FreshModelSpec(
    hidden_size=128, layers=12, heads=4, kv_heads=2, head_dim=32, intermediate_size=256
)
LARGEST = 128 * 256 * 4  # bytes of the largest tensor, in float32
TRANSPORTS = ("object_store", "disk", "gloo")


def model_of_many_layers(folder: Path) -> str:
    return str(build_fresh_model(folder, ALPHABET, SHAPE, seed=0, max_len=64))


class Extra:
    """Bytes of torch's and of numpy's memory that were made at most while it was open."""

    def __enter__(self) -> Extra:
        gc.collect()
        self._live = LiveBytes()
        self._live.note(t for t in gc.get_objects() if isinstance(t, torch.Tensor))
        self._before = self._live.most = self._live.now
        if not tracemalloc.is_tracing():
            tracemalloc.start()
        tracemalloc.clear_traces()
        self._live.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._live.__exit__(*raised)
        self.tensors = self._live.most - self._before
        # never stopped: a gloo thread that allocates meanwhile would crash (CPython 3.11)
        self.arrays = tracemalloc.get_traced_memory()[1]


def extra_of_publications(
    rank: int, world: int, port: int, model: str, folder: str
) -> dict[tuple[int, str], Any]:
    """(stage, transport) -> (bytes of the set, most extra bytes of tensors and of arrays here, and
    of tensors at the receiver)."""
    out = {}
    for stage in (0, 3):
        one = learner(rank, world, port, model, zero_stage=stage)
        for transport in TRANSPORTS:
            at = Path(folder) / f"{stage}-{transport}"
            out[stage, transport] = _published(one, rank, transport, at)
    return out


def _published(one: Any, rank: int, transport: str, folder: Path) -> tuple[int, ...]:
    def read(only: Any = None) -> Any:
        return one.published_weights(POLICY, "bfloat16", only)

    shapes = one.published_shapes(POLICY)
    received: list[int] = []
    manifest = announce(1, shapes, "bfloat16", read, full=False, seed=0)
    if rank != 0:
        with Extra() as extra:
            for _ in read():
                pass
    else:
        send, receive = _ends(transport, folder, manifest)
        with Extra() as extra:
            handle = send(read())
        received = [receive(handle)]
    size = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    return size, extra.tensors, extra.arrays, *received


def _ends(
    transport: str, folder: Path, manifest: WeightManifest
) -> tuple[Callable[[Any], Any], Callable[[Any], int]]:
    """What sends tensors and returns a handle, and what receives them and returns the most bytes
    that it held."""
    if transport == "gloo":
        return _group(manifest)
    if transport == "disk":
        disk = DiskTransport(folder, bucket_bytes=BUCKET)
        # a reader maps the file
        return lambda tensors: disk.publish(manifest, tensors), lambda handle: 0
    folder.mkdir()

    def put(blob: np.ndarray) -> Path:  # an object store's memory is not the process's
        file = folder / str(len(list(folder.iterdir())))
        blob.tofile(file)
        return file

    store = ObjectStoreTransport(put, lambda f: np.fromfile(f, np.uint8), bucket_bytes=BUCKET)

    def receive(handle: Any) -> int:
        return _most_held(lambda: store.receive(manifest, handle))

    return lambda tensors: store.publish(manifest, tensors), receive


def _most_held(buckets: Callable[[], Iterable[Any]]) -> int:
    with LiveBytes() as live:
        for _ in buckets():
            pass
    return live.most


def _group(manifest: WeightManifest) -> tuple[Callable[[Any], Any], Callable[[Any], int]]:
    """A thread receives, whose tensors are counted apart."""
    port = free_port()

    def join(rank: int) -> BroadcastGroup:
        place = Rendezvous("127.0.0.1", port, rank, 2)
        return BroadcastGroup(place, join_timeout_s=60, timeout_s=60, bucket_bytes=BUCKET)

    def take() -> int:
        group = join(1)
        return _most_held(lambda: group.receive(manifest))

    taken = ThreadPoolExecutor(1).submit(take)
    group = join(0)
    return lambda tensors: group.send(manifest, tensors), lambda _: taken.result(60)


def extra_of_checkpoints(
    rank: int, world: int, port: int, model: str, folder: str
) -> dict[int, tuple[int, int]]:
    """stage -> (bytes of the whole state, most extra bytes of tensors while it is saved)."""
    out = {}
    for stage in (0, 1, 2, 3):
        one = learner(rank, world, port, model, zero_stage=stage)
        one.begin_phase([make_groups(2)])
        one.train_step(0)
        trained = one.engine.trained.values()
        entries = sum(getattr(p, "ds_numel", p.numel()) for p in trained)
        with Extra() as extra:
            one.save(Path(folder) / f"stage{stage}")
        out[stage] = 12 * entries, extra.tensors
    return out
