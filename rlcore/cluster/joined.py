"""Waiting until all nodes of a Slurm job have joined its Ray cluster, and naming those that have
not: `python -m rlcore.cluster.joined ADDRESS SECONDS FAILED HOST...`."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from ray._raylet import GcsClient
from ray.core.generated.gcs_pb2 import GcsNodeInfo

POLL_S = 1.0
NEWS_S = 60.0  # nodes that are missing are named this often
ANSWER_S = 5  # deadline of a question to Ray's head


def living(address: str) -> list[str]:
    """Host names of the nodes that are alive. Empty while the head does not answer."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
        nodes = GcsClient(address=address).get_all_node_info(timeout=ANSWER_S)
    except (OSError, RuntimeError):  # Ray's errors of calls are RuntimeErrors
        return []
    return [
        node.node_manager_hostname for node in nodes.values() if node.state == GcsNodeInfo.ALIVE
    ]


def missing(hosts: Collection[str], found: Collection[str]) -> list[str]:
    """Those of Slurm's hosts that are not among Ray's, which may call them by their full names."""
    short = {name.partition(".")[0] for name in found}
    return [host for host in hosts if host.partition(".")[0] not in short]


def wait(address: str, limit_s: float, failed: Path, hosts: Sequence[str]) -> int:
    """Return 0 once all hosts have joined, 1 with a sentence after `limit_s` or when a node has
    given up, which it writes to the file `failed`."""
    began = time.monotonic()
    news = began + NEWS_S
    while True:
        found = living(address)
        late = missing(hosts, found)
        if len(found) >= len(hosts):
            return 0
        now = time.monotonic()
        why = f"nodes that have not joined Ray after {now - began:.0f} s: {', '.join(late)}"
        if failed.exists():
            print("rlcore: a node does not start, the job is tried again elsewhere", flush=True)
            return 1
        if now > began + limit_s:
            key = f"cluster.launch.start_timeout_s={limit_s:g}"
            print(f"rlcore: {why} ({key})", flush=True)
            return 1
        if now > news:
            print(f"rlcore: {why}; waiting", flush=True)
            news += NEWS_S
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(wait(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
