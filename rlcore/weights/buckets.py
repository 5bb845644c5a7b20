"""Weights through an object store or a shared folder: one safetensors blob a bucket, or one file a
version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlcore.files import new_file
from rlcore.interfaces import TransportEnds, WeightTransport
from rlcore.types import WeightManifest
from rlcore.weights.blob import TensorEntry, from_blob, to_blob, write_stream
from rlcore.weights.deltas import DeltaTransport
from rlcore.weights.stream import arriving, in_buckets, in_order


class ObjectStoreTransport(WeightTransport):
    """Uses the `put` and `get` of an object store; only the store holds a whole set."""

    def __init__(
        self,
        put: Callable[[np.ndarray], Any] | None,
        get: Callable[[Any], np.ndarray] | None,
        *,
        bucket_bytes: int,
    ) -> None:
        """Only the learner's side needs `put`, only the actor's side `get`."""
        self._put = put
        self._get = get
        self._bucket_bytes = bucket_bytes

    @classmethod
    def between(cls, ends: TransportEnds) -> WeightTransport:
        """With `full_weights_every` above 1, a `DeltaTransport`."""
        if ends.full_weights_every > 1:
            return DeltaTransport.between(ends)
        return cls(ends.put, ends.get, bucket_bytes=ends.bucket_bytes)

    def publish(
        self, manifest: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> list[Any]:
        """Put a blob for each bucket; the handle lists what `put` returned.

        Raises ArrivalError if tensors and manifest disagree.
        """
        if self._put is None:
            raise RuntimeError("this side of the transport was built without put: it only receives")
        handles = []
        for bucket in in_buckets(in_order(manifest, tensors), self._bucket_bytes):
            blob = to_blob(bucket)
            bucket.clear()  # the generator still holds the dictionary
            handles.append(self._put(blob))
            del blob
        return handles

    def receive(
        self, manifest: WeightManifest, handle: Sequence[Any]
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        """CPU tensors, read-only views into the store's memory, a bucket at a time.

        Raises ArrivalError if they are not as announced.
        """
        if self._get is None:
            raise RuntimeError("this side of the transport was built without get: it only sends")
        get = self._get
        return arriving(manifest, (from_blob(get(one)) for one in handle))


class DiskTransport(WeightTransport):
    """A folder that learner and actors share. Keeps the newest `keep` versions."""

    def __init__(self, folder: str | Path, *, bucket_bytes: int, keep: int = 2) -> None:
        """`bucket_bytes`: size of the buckets that a reader is given."""
        self._folder = Path(folder)
        self._bucket_bytes = bucket_bytes
        self._keep = keep
        self._written: list[Path] = []

    @classmethod
    def between(cls, ends: TransportEnds) -> DiskTransport:
        return cls(ends.folder, bucket_bytes=ends.bucket_bytes)

    def publish(self, manifest: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
        """Write one version, tensor by tensor; the handle is the file's path.

        Raises OSError (a full disk) and leaves no partial file, or ArrivalError if tensors and
        manifest disagree.
        """
        dtype = getattr(torch, manifest.dtype)
        entries = {
            n: TensorEntry(dtype, s) for n, s in zip(manifest.names, manifest.shapes, strict=True)
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"weights-{manifest.version:08d}.safetensors"
        # Flushed, since another node may read it as soon as it has the path.
        with new_file(path, durable=True) as file:
            write_stream(file, entries, in_order(manifest, tensors))
        self._remove_old(path)
        return str(path)

    def _remove_old(self, newest: Path) -> None:
        # A version that is published again (after a recovery) counts as the newest once.
        self._written = [p for p in self._written if p != newest] + [newest]
        for old in self._written[: -self._keep]:
            old.unlink(missing_ok=True)
        self._written = self._written[-self._keep :]

    def receive(
        self, manifest: WeightManifest, handle: str
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        """CPU tensors of one version, views into the mapped file, a bucket at a time.

        Raises ArrivalError if they are not as announced, OSError for a missing file.
        """
        tensors = from_blob(np.memmap(handle, np.uint8, mode="r"))
        return arriving(manifest, in_buckets(tensors.items(), self._bucket_bytes))
