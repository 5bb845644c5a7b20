"""Builds the transport of weights that a run chose; the object store is Ray's."""

from __future__ import annotations

from typing import Any

import ray

from rlcore.cluster.jobs import Hosting
from rlcore.interfaces import WeightTransport


def make_transport(hosting: Hosting) -> WeightTransport | None:
    """This process's end of it; None for one that is a group, joined when all have started."""
    name = hosting.transport.transport
    if name == "object_store":
        from rlcore.weights.object_store import ObjectStoreTransport

        def receive(handle: list[Any]) -> Any:
            return ray.get(handle[0], timeout=hosting.schedule.publish_timeout_s)

        # The reference travels inside a list: Ray resolves bare references before the call, and the
        # actor would hold the whole blob twice.
        return ObjectStoreTransport(put=lambda blob: [ray.put(blob)], get=receive)
    if name == "disk":
        from rlcore.weights.disk import DiskTransport

        return DiskTransport(hosting.weights_folder)
    return None


def join_group(
    hosting: Hosting, host: str, port: int, rank: int, world_size: int
) -> WeightTransport:
    """The broadcast group of rank 0 (the learner's first rank) and the actors. Blocks until all of
    them have joined."""
    from rlcore.weights.nccl import NcclTransport
    from rlcore.weights.rendezvous import Rendezvous

    name = hosting.transport.transport
    assert name in ("nccl", "gloo"), name
    return NcclTransport(
        Rendezvous(host, port, rank, world_size),
        backend=name,
        join_timeout_s=hosting.supervision.start_timeout_s,
        timeout_s=hosting.schedule.publish_timeout_s,
    )
