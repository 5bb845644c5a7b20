"""The nodes of a Slurm job in its Ray cluster: waiting until all have joined, then watching that
enough are left.

    python -m rlcore.cluster.joined wait ADDRESS SECONDS FAILED HOST...
    python -m rlcore.cluster.joined watch ADDRESS LEAST SCRIPT HOST...
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]

POLL_S = 1.0
NEWS_S = 60.0  # nodes that are missing are named this often
PATIENCE_S = 120.0  # a node may be away so long: Ray is started again there
WATCH_S = 5.0
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


def watch(address: str, least: int, script: int, hosts: Sequence[str]) -> None:
    """Name nodes that leave and come back. Once fewer than `least` have been there for PATIENCE_S,
    ask the batch script (a process id) by SIGUSR1 to requeue the job at a checkpoint, and return.
    A head that does not answer is the run's own matter."""
    gone: dict[str, float] = {}
    while True:
        time.sleep(WATCH_S)
        if not (found := living(address)):
            continue
        now, away = time.monotonic(), set(missing(hosts, found))
        for host in sorted(away - gone.keys()):
            print(f"rlcore: {host} has left Ray", flush=True)
        for host in sorted(gone.keys() - away):
            print(f"rlcore: {host} is back in Ray after {now - gone[host]:.0f} s", flush=True)
        gone = {host: gone.get(host, now) for host in away}
        long = [host for host, since in gone.items() if now - since > PATIENCE_S]
        if len(hosts) - len(long) < least:
            print(
                f"rlcore: {len(hosts) - len(long)} of {len(hosts)} nodes are left, fewer than "
                f"{least} (cluster.launch.min_actor_nodes): the job is requeued at a checkpoint",
                flush=True,
            )
            os.kill(script, signal.SIGUSR1)
            return


def main(words: Sequence[str] | None = None) -> int:
    verb, address, *more = sys.argv[1:] if words is None else words
    if verb == "wait":
        return wait(address, float(more[0]), Path(more[1]), more[2:])
    watch(address, int(more[0]), int(more[1]), more[2:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
