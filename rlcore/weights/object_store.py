"""Weights through an object store: one safetensors blob, put once, which every actor of a node
maps without a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rlcore.interfaces import WeightTransport
from rlcore.types import WeightManifest
from rlcore.weights.blob import from_blob, to_blob
from rlcore.weights.manifest import verify_tensors


class ObjectStoreTransport(WeightTransport):
    """Uses the `put` and `get` of an object store."""

    def __init__(
        self, put: Callable[[np.ndarray], Any] | None, get: Callable[[Any], np.ndarray] | None
    ) -> None:
        """Only the learner's side needs `put`, only the actor's side `get`."""
        self._put = put
        self._get = get

    def publish(self, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Put one blob; the handle is whatever `put` returns.

        Raises ArrivalError if tensors and manifest disagree.
        """
        if self._put is None:
            raise RuntimeError("this side of the transport was built without put: it only receives")
        verify_tensors(manifest, tensors)
        return self._put(to_blob(tensors))

    def receive(self, manifest: WeightManifest, handle: Any) -> dict[str, torch.Tensor]:
        """CPU tensors, read-only views into the store's memory.

        Raises ArrivalError if they are not as announced.
        """
        if self._get is None:
            raise RuntimeError("this side of the transport was built without get: it only sends")
        tensors = from_blob(self._get(handle))
        verify_tensors(manifest, tensors)
        return tensors
