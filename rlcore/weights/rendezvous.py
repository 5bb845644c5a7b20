"""Where the ranks of a group find each other: a key-value store that rank 0 serves."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist


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
