"""Where the ranks of a group meet: a key-value store that rank 0 serves, on one address and no other."""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta

import torch.distributed as dist


def meeting_store(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store of `world_size` ranks at `host`:`port`; blocks until rank 0 serves it.

    torch by itself would listen on every interface of the machine, and anybody may write into a store: here rank 0
    listens on `host` alone, and gloo's own sockets stay on loopback where `host` is loopback. Raises OSError when
    rank 0 cannot listen there, torch's DistNetworkError or DistStoreError when the ranks do not meet in time.
    """
    if _is_loopback(host):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if rank:
        return dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2 * world_size)
    fd = listener.detach()  # the store closes it
    return dist.TCPStore(host, port, world_size, is_master=True, timeout=timeout, master_listen_fd=fd)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
