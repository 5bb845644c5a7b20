"""Weights through an object store: one safetensors blob a bucket, which every actor of a node maps
without a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlcore.interfaces import TransportEnds, WeightTransport
from rlcore.types import WeightManifest
from rlcore.weights.blob import from_blob, to_blob
from rlcore.weights.deltas import DeltaTransport
from rlcore.weights.stream import arriving, in_buckets, in_order


class ObjectStoreTransport(WeightTransport):
    """Uses the `put` and `get` of an object store, which alone holds a whole set."""

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
        """With `whole_every` above 1, one that sends what has changed."""
        if ends.whole_every > 1:
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
