"""Builds the transport a run chose; the object store is Ray's."""

from __future__ import annotations

from typing import Any

import ray

from rlcore.errors import UserError
from rlcore.interfaces import WeightTransport

GROUPS = ("nccl", "gloo")  # transports that learner and actors join together


def make_transport(name: str, folder: str) -> WeightTransport | None:
    """`object_store`, or `disk` in `folder`, which learner and actors share; None for those that are joined later."""
    if name == "object_store":
        from rlcore.weights.object_store import ObjectStoreTransport

        # The reference travels inside a list: Ray resolves bare references before the call, and the actor would
        # hold the whole blob twice.
        return ObjectStoreTransport(put=lambda blob: [ray.put(blob)], get=_get)
    if name == "disk":
        from rlcore.weights.disk import DiskTransport

        return DiskTransport(folder)
    if name in GROUPS:
        return None
    raise UserError.choice("cluster.transport", name, ("object_store", "disk", *GROUPS))


def join_group(name: str, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> WeightTransport:
    """The broadcast group of rank 0 (the learner's first rank) and the actors. Blocks until all of them have joined."""
    from rlcore.weights.nccl import NcclTransport

    return NcclTransport(
        host=host,
        port=port,
        rank=rank,
        world_size=world_size,
        device="cuda" if name == "nccl" else "cpu",
        backend=name,  # type: ignore[arg-type]
        timeout_s=timeout_s,
    )


def _get(handle: list[Any]) -> Any:
    return ray.get(handle[0], timeout=300)
