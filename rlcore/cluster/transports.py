"""Builds the transport of weights that a run chose; the object store is Ray's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import ray

from rlcore.cluster.jobs import Hosting
from rlcore.interfaces import WeightTransport
from rlcore.weights.group import BroadcastGroup, GlooSender, GroupReceiver, GroupSender, Join


def make_transport(hosting: Hosting, sent: str = "") -> WeightTransport | None:
    """This process's end of it; None for one that is a group (`make_sender`, `make_receiver`).

    `sent`: the set that a learner sends by it.
    """
    name = hosting.transport.transport
    bucket_bytes = hosting.transport.bucket_mib << 20
    if name == "object_store":
        from rlcore.weights.deltas import DeltaTransport
        from rlcore.weights.object_store import ObjectStoreTransport

        def receive(handle: list[Any]) -> Any:
            return ray.get(handle[0], timeout=hosting.schedule.publish_timeout_s)

        # The reference travels inside a list: Ray resolves bare references before the call, and the
        # actor would hold the whole blob twice.
        def put(blob: Any) -> list[Any]:
            return [ray.put(blob)]

        whole_every = hosting.transport.whole_every
        if whole_every > 1:
            return DeltaTransport(put, receive, bucket_bytes=bucket_bytes, whole_every=whole_every)
        return ObjectStoreTransport(put, receive, bucket_bytes=bucket_bytes)
    if name == "disk":
        from rlcore.weights.disk import DiskTransport

        folder = Path(hosting.weights_folder) / sent
        return DiskTransport(folder, bucket_bytes=bucket_bytes)
    return None


def make_sender(hosting: Hosting, rank: int) -> GroupSender:
    """A learner rank's end of a group transport. Joins nothing yet."""
    name = hosting.transport.transport
    if name == "gloo":
        return GlooSender(rank, _join(hosting), _address)
    from rlcore.weights.vllm_transfer import VllmSender

    bucket_bytes, whole_every = hosting.transport.bucket_mib << 20, hosting.transport.whole_every
    sender = VllmSender(name, rank, _address, bucket_bytes=bucket_bytes)
    if whole_every == 1:
        return sender
    from rlcore.weights.vllm_patches import PatchSender

    return PatchSender(rank, sender, bucket_bytes=bucket_bytes, whole_every=whole_every)


def make_receiver(hosting: Hosting) -> Any:
    """A rollout actor's end of a group transport, with a method `buckets(manifest, arrival)`."""
    if hosting.transport.transport == "gloo":
        return GroupReceiver(_join(hosting))
    from rlcore.rollout.transfer import EngineReceiver

    return EngineReceiver()


def _join(hosting: Hosting) -> Join:
    return partial(
        BroadcastGroup,
        join_timeout_s=hosting.supervision.start_timeout_s,
        timeout_s=hosting.schedule.publish_timeout_s,
        bucket_bytes=hosting.transport.bucket_mib << 20,
    )


def _address() -> tuple[str, int]:
    from rlcore.cluster.placement import free_port

    host = ray.util.get_node_ip_address()
    return host, free_port(0, host)
