"""Weights by broadcast among processes, over gloo: the group transport of machines without a GPU.

It follows the same calls in the same order as the transports of GPUs (`vllm_transfer.py`), so that
tests of it on CPU cover their order of calls, too. torch's process group is used directly, outside
the default group.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlcore.errors import DeadlineExceeded
from rlcore.reasons import message_of
from rlcore.types import WeightManifest
from rlcore.weights.arrival import FINISH, Arrival
from rlcore.weights.sending import Receivers, Sending
from rlcore.weights.stream import arriving, in_order


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """How one rank joins a group. Example: Rendezvous("10.0.0.1", 29500, rank=0, world_size=3)"""

    host: str  # address at which rank 0 listens
    port: int
    rank: int
    world_size: int


def rendezvous_store(
    host: str, port: int, rank: int, world_size: int, timeout: timedelta
) -> dist.Store:
    """The store of `world_size` ranks at `host`:`port`; blocks until rank 0 serves it.

    By default torch listens on every network interface, and anyone can write to the store. Here
    rank 0 listens on `host` alone, and gloo's own sockets stay on loopback if `host` is loopback.
    Raises OSError if rank 0 cannot listen there, torch's DistNetworkError or DistStoreError if the
    ranks do not connect in time."""
    if _is_loopback(host):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if rank:
        return dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    # Bound here rather than by torch, which offers no address to bind to.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2 * world_size)
    fd = listener.detach()  # the store closes it
    return dist.TCPStore(
        host, port, world_size, is_master=True, timeout=timeout, master_listen_fd=fd
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, not an address
        return host == "localhost"


Pairs = Iterable[tuple[str, torch.Tensor]]
# the tensors of one buffer: (name, shape, first byte)
_Part = list[tuple[str, tuple[int, ...], int]]


class GroupSender(ABC):
    """A learner rank's end of a group. Every rank makes the same calls."""

    @abstractmethod
    def send(
        self, manifest: WeightManifest, receivers: Receivers, read: Callable[[], Pairs]
    ) -> Sending | None:
        """Send a set to all receivers; returns when they have loaded it. Forms the group anew if
        the receivers are others than before. Rank 0 returns the `Sending` of a patch; None: a whole
        set was sent."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""


class BroadcastGroup:
    """Rank 0 sends, ranks 1.. receive; all take part in every version.

    A rank that dies breaks the group: the others get DeadlineExceeded, and a new group is formed.
    """

    def __init__(
        self, place: Rendezvous, *, join_timeout_s: float, timeout_s: float, bucket_bytes: int
    ) -> None:
        """Join the group; returns when every rank has joined and taken part in a first broadcast.

        `timeout_s` bounds every broadcast. Raises DeadlineExceeded if the ranks do not join within
        `join_timeout_s`.
        """
        self._rank = place.rank
        self._bucket_bytes = bucket_bytes
        self._timeout = timedelta(seconds=timeout_s)
        join_timeout = timedelta(seconds=join_timeout_s)
        try:
            shared = rendezvous_store(
                place.host, place.port, place.rank, place.world_size, join_timeout
            )
            store = dist.PrefixStore("rlcore/weights", shared)
            self._group: Any = dist.ProcessGroupGloo(
                store, place.rank, place.world_size, join_timeout
            )
        except (dist.DistStoreError, dist.DistNetworkError, RuntimeError) as e:
            raise DeadlineExceeded(
                f"waited {join_timeout_s:g} s for {place.world_size} ranks to join at "
                f"{place.host}:{place.port} (cluster.start_timeout_s): {e}"
            ) from e
        # Some backends connect in their first collective, which blocks until all have entered it:
        # here nothing else can come between.
        self._broadcast(torch.zeros(1, dtype=torch.uint8))

    def send(self, manifest: WeightManifest, tensors: Pairs) -> None:
        """Rank 0: pack the tensors into buckets as they are made, and broadcast each."""
        passing = in_order(manifest, tensors)
        for part, size in _pack(manifest, self._bucket_bytes):
            # Bytes, not values: a bucket may hold any dtype, and nothing is converted on the way.
            buffer = torch.empty(size, dtype=torch.uint8)
            for _, _, start in part:
                source = next(passing)[1].detach().contiguous().reshape(-1).view(torch.uint8)
                buffer[start : start + source.numel()].copy_(source)
                del source
            self._broadcast(buffer)
            del buffer
        next(passing, None)  # raises for a tensor that was not announced

    def receive(self, manifest: WeightManifest) -> Iterator[dict[str, torch.Tensor]]:
        """Ranks 1..: the buckets as they come, views into a buffer each."""
        dtype = getattr(torch, manifest.dtype)
        for part, size in _pack(manifest, self._bucket_bytes):
            buffer = torch.empty(size, dtype=torch.uint8)
            self._broadcast(buffer)
            yield {
                name: buffer[start : start + _bytes(shape, manifest.dtype)]
                .view(dtype)
                .reshape(shape)
                for name, shape, start in part
            }
            del buffer

    def _broadcast(self, buffer: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            self._group.broadcast([buffer], options).wait(self._timeout)
        except RuntimeError as e:
            raise DeadlineExceeded(
                f"a weight broadcast did not end within {self._timeout.total_seconds():g} s "
                f"(schedule.publish_timeout_s) or a rank was lost: {message_of(str(e))}"
            ) from e


Join = Callable[[Rendezvous], BroadcastGroup]


class GlooSender(GroupSender):
    """The learner's end over gloo. Only rank 0 is in the group."""

    def __init__(self, rank: int, join: Join, address: Callable[[], tuple[str, int]]) -> None:
        """`address`: a host and a free port of this machine, for each group."""
        self._rank = rank
        self._join = join
        self._address = address
        self._group: BroadcastGroup | None = None
        self._members: tuple[str, ...] = ()

    def send(
        self, manifest: WeightManifest, receivers: Receivers, read: Callable[[], Pairs]
    ) -> None:
        if self._rank != 0:
            for _ in read():
                pass
            return
        if self._group is None or self._members != tuple(receivers.members):
            self._form(receivers)
        assert self._group is not None
        count = len(receivers.members)
        received = receivers.start("receive", [None] * count)
        self._group.send(manifest, read())
        received()
        receivers.start(FINISH, [None] * count)()

    def _form(self, receivers: Receivers) -> None:
        self.close()
        host, port = self._address()
        world = len(receivers.members) + 1
        places = [Rendezvous(host, port, rank, world) for rank in range(world)]
        joined = receivers.start("join", places[1:])
        self._group = self._join(places[0])
        joined()
        self._members = tuple(receivers.members)

    def close(self) -> None:
        self._group = None


class GroupReceiver:
    """A receiving process over gloo; it stays in its group until it is asked to join another."""

    def __init__(self, join: Join) -> None:
        self._join = join
        self._group: BroadcastGroup | None = None

    def buckets(self, manifest: WeightManifest, arrival: Arrival) -> Iterator[Any]:
        """The buckets of one publication, as the sender's requests bring them."""
        for request in arrival.requests():
            with request:
                if request.verb == "join":
                    self._group = None  # leave the old group before its successor connects
                    self._group = self._join(request.payload)
                elif request.verb == "receive":
                    assert self._group is not None, "asked to receive before it was asked to join"
                    yield from arriving(manifest, self._group.receive(manifest))


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return torch.Size(shape).numel() * getattr(torch, dtype).itemsize


def _pack(manifest: WeightManifest, limit: int) -> Iterator[tuple[_Part, int]]:
    """Tensors in order, packed into buffers of at most `limit` bytes, 16-byte aligned.

    A larger tensor has its own buffer.
    """
    part: _Part = []
    at = 0
    for name, shape in zip(manifest.names, manifest.shapes, strict=True):
        size = _bytes(shape, manifest.dtype)
        if part and at + size > limit:
            yield part, at
            part = []
            at = 0
        part.append((name, shape, at))
        # Aligned, so that a view of the bytes as any dtype is possible.
        at += -(-size // 16) * 16
    if part:
        yield part, at
