"""Weights through an object store: one safetensors blob, put once, mapped by every actor of a node without a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rlcore.types import WeightManifest
from rlcore.weights.blob import from_blob, to_blob
from rlcore.weights.manifest import verify_tensors


class ObjectStoreTransport:
    """`WeightTransport` over given `put` and `get` (the runtime's object store)."""

    def __init__(self, put: Callable[[np.ndarray], Any] | None, get: Callable[[Any], np.ndarray] | None) -> None:
        """`put` is needed by the learner side only, `get` by the actor side only."""
        self._put, self._get = put, get

    def publish(self, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Put one blob; the handle is whatever `put` returns. Raises ArrivalError if tensors and manifest disagree."""
        if self._put is None:
            raise RuntimeError("this side of the transport was built without put: it can only receive")
        verify_tensors(manifest, tensors)
        return self._put(to_blob(tensors))

    def receive(self, manifest: WeightManifest, handle: Any) -> dict[str, torch.Tensor]:
        """CPU tensors, views into the store's memory: read-only. Raises ArrivalError for anything not as announced."""
        if self._get is None:
            raise RuntimeError("this side of the transport was built without get: it can only publish")
        tensors = from_blob(self._get(handle))
        verify_tensors(manifest, tensors)
        return tensors
