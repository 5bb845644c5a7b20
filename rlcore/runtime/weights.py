"""Builds the transport a run chose; the object store is Ray's."""

from __future__ import annotations

from typing import Any

import ray

from rlcore.errors import UserError
from rlcore.interfaces import WeightTransport


def make_transport(name: str, folder: str) -> WeightTransport:
    """`object_store`, `disk` (in `folder`, which learner and actors share) or `nccl`."""
    if name == "object_store":
        from rlcore.weights.object_store import ObjectStoreTransport

        # The reference travels inside a list: Ray resolves bare references before the call, and the actor would
        # hold the whole blob twice.
        return ObjectStoreTransport(put=lambda blob: [ray.put(blob)], get=_get)
    if name == "disk":
        from rlcore.weights.disk import DiskTransport

        return DiskTransport(folder)
    raise UserError.choice("cluster.transport", name, ("object_store", "disk"))


def _get(handle: list[Any]) -> Any:
    return ray.get(handle[0], timeout=300)
