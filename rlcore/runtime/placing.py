"""Where a learner's ranks run and meet: the same for training and for the supervised warm-up."""

from __future__ import annotations

from typing import Any

from rlcore.config.schema import RunConfig
from rlcore.launch.settings import LEARNER_RESOURCE
from rlcore.runtime import shells
from rlcore.runtime.cluster import actor_class, free_port, get, joined_address

SLIVER = 0.001  # of a node's custom resource: binds a role to such nodes without counting them


def on_nodes(config: RunConfig, resource: str) -> dict[str, float]:
    """The custom resource that binds a role to its nodes, when the learner has nodes of its own."""
    return {resource: SLIVER} if config.cluster.launch.learner_nodes else {}


def spawn_ranks(config: RunConfig, ranks: int, buffer: Any, transport: str, folder: str) -> list[Any]:
    """Handles of new learner processes, not started yet."""
    shell = actor_class(
        shells.LearnerShell,
        num_cpus=config.learner.num_cpus,
        num_gpus=config.learner.num_gpus,
        resources=on_nodes(config, LEARNER_RESOURCE),
        concurrency_groups=shells.LEARNER_THREADS,
    )
    return [shell.remote(buffer, transport, folder) for _ in range(ranks)]


def meeting(config: RunConfig, ranks: list[Any], port: int = 0) -> tuple[str, int]:
    """Where the ranks of one learner find each other: on loopback in a cluster of our own, else on rank 0's node.

    Raises UserError if `port` is given and taken there.
    """
    if joined_address(config.cluster.address) is None:
        return "127.0.0.1", free_port(port)
    limit = config.cluster.start_timeout_s  # the rank may wait for room first
    what, key = "the learner's address", "cluster.start_timeout_s"
    host, free = get(ranks[0].address.remote(port), timeout_s=limit, what=what, key=key)
    return str(host), int(free)
