"""The address of a job's first node, for the other nodes: `python -m rlcore.launch.address`."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

import psutil

ANYWHERE = "192.0.2.1"  # a documentation network: reached by the default route, if there is one


def own_address(interface: str, other: str) -> str:
    """The IPv4 address of this machine on a network interface, else the one by which it reaches the
    machine `other`, else the one of its default route. A machine may have more: docker0 is often
    listed first.

    Raises SystemExit with a sentence for an interface without an address.
    """
    if interface:
        found = [
            a.address
            for a in psutil.net_if_addrs().get(interface, [])
            if a.family == socket.AF_INET
        ]
        if not found:
            known = ", ".join(sorted(psutil.net_if_addrs()))
            sys.exit(
                f"rlcore: cluster.launch.interface={interface} has no IPv4 address on "
                f"{socket.gethostname()}: choose among {known}."
            )
        return found[0]
    for target in filter(None, (other, socket.gethostname(), ANYWHERE)):
        address = _towards(target)
        if not address.startswith("127."):
            return address
    return "127.0.0.1"


def _towards(host: str) -> str:
    """The source address of packets to a host; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def main(words: Sequence[str] | None = None) -> int:
    interface, other = sys.argv[1:] if words is None else words
    print(own_address(interface, other))
    return 0


if __name__ == "__main__":
    sys.exit(main())
