"""Builds one end of the transport of weights that a run chose (`weights.specs.TRANSPORTS`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import ray

from rlcore.cluster.specs import Hosting
from rlcore.interfaces import TransportEnds, WeightTransport
from rlcore.registry import resolve
from rlcore.weights.group import BroadcastGroup, GlooSender, GroupReceiver, GroupSender, Join
from rlcore.weights.specs import GROUP_TRANSPORTS, TRANSPORTS

KEY = "cluster.transport"


def make_transport(hosting: Hosting, sent: str = "") -> WeightTransport:
    """This process's end of a transport that is not a group. `sent`: the set that a learner sends.
    Raises UserError for a class that is not a transport."""
    spec = hosting.transport

    def get(handle: list[Any]) -> Any:
        return ray.get(handle[0], timeout=hosting.schedule.publish_timeout_s)

    # The reference travels inside a list: Ray resolves bare references before the call, and the
    # actor would hold the whole blob twice.
    def put(blob: Any) -> list[Any]:
        return [ray.put(blob)]

    ends = TransportEnds(
        put=put,
        get=get,
        folder=Path(hosting.run_dir) / "weights" / sent,
        bucket_bytes=spec.bucket_mib << 20,
        full_weights_every=spec.full_weights_every,
    )
    cls = resolve(TRANSPORTS, spec.transport, key=KEY, like=WeightTransport)
    transport: WeightTransport = cls.between(ends)
    return transport


def make_group(hosting: Hosting) -> GroupTransport:
    """The group transport that a run chose, without joining a group yet."""
    cls = resolve(GROUP_TRANSPORTS, hosting.transport.transport, key=KEY, like=GroupTransport)
    group: GroupTransport = cls(hosting)
    return group


class GroupTransport(ABC):
    """Learner ranks and engines that join one group, in which weights go to all at once."""

    #: weights are read on the model's device; false: as copies on the CPU
    on_device: ClassVar[bool] = True

    def __init__(self, hosting: Hosting) -> None:
        self.hosting = hosting

    @property
    def everywhere(self) -> bool:
        """Optional. Every rank reads whole weights, not rank 0 alone."""
        return False

    @abstractmethod
    def sender(self, rank: int) -> GroupSender:
        """A learner rank's end."""

    @abstractmethod
    def receiver(self) -> Any:
        """A rollout actor's end, with a method `buckets(manifest, arrival)`."""


class GlooGroup(GroupTransport):
    """Weights between CPUs."""

    on_device = False

    def sender(self, rank: int) -> GroupSender:
        return GlooSender(rank, self._join(), _address)

    def receiver(self) -> Any:
        return GroupReceiver(self._join())

    def _join(self) -> Join:
        return partial(
            BroadcastGroup,
            join_timeout_s=self.hosting.supervision.start_timeout_s,
            timeout_s=self.hosting.schedule.publish_timeout_s,
            bucket_bytes=self.hosting.transport.bucket_mib << 20,
        )


class VllmGroup(GroupTransport):
    """Weights between GPUs, by vLLM's weight transfer: nccl, or ipc on a GPU that both share."""

    @property
    def everywhere(self) -> bool:
        return self.hosting.transport.transport == "ipc"  # each GPU's own copy is read

    def sender(self, rank: int) -> GroupSender:
        from rlcore.weights.vllm_transfer import VllmSender

        spec = self.hosting.transport
        bucket_bytes = spec.bucket_mib << 20
        sender = VllmSender(spec.transport, rank, _address, bucket_bytes=bucket_bytes)
        if spec.full_weights_every == 1:
            return sender
        from rlcore.weights.vllm_transfer import PatchSender

        return PatchSender(
            rank, sender, bucket_bytes=bucket_bytes, full_weights_every=spec.full_weights_every
        )

    def receiver(self) -> Any:
        from rlcore.weights.arrival import EngineReceiver

        return EngineReceiver()


def _address() -> tuple[str, int]:
    from rlcore.cluster.placement import free_port

    host = ray.util.get_node_ip_address()
    return host, free_port(0, host)
