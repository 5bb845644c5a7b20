"""Placement of processes, and rendezvous addresses."""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from rlcore.cluster.calls import get
from rlcore.errors import DeadlineExceeded, UserError
from rlcore.launch.specs import ACTOR_RESOURCE

CALL_THREADS = 8  # of actors whose calls only queue work or read state
SLIVER = 0.001  # of a node's custom resource: binds a role to such nodes without counting them
ANY = -1  # bundle of a placement group, in Ray's words
HALF = 0.5  # of a GPU: Ray then shows one and the same to both processes of a bundle
PORTS = range(20000, 32768)  # below those that outgoing connections draw theirs from


def actor_class(plain: type, **settings: Any) -> Any:
    """A class as a Ray actor's. Ray's head keeps no record of each call, which would take 200 MiB
    an hour."""
    remote: Any = ray.remote
    return remote(enable_task_events=False, **settings)(plain)


def beside_driver() -> NodeAffinitySchedulingStrategy:
    """The driver's node, whose loss ends the attempt anyway. Ray puts a role without resources on
    any node, even if it asks for one, unless that is the only one it accepts."""
    return on_node(ray.get_runtime_context().get_node_id())


def bound_to(resource: str, *, own_nodes: bool) -> dict[str, float]:
    """The custom resource that binds a role to its nodes, when the learner has its own nodes."""
    return {resource: SLIVER} if own_nodes else {}


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """This node and no other."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def other_actor_nodes(*, own_nodes: bool) -> Mapping[str, Mapping[str, float]]:
    """Resources by id of the living nodes that rollout actors may be on, but the driver's."""
    here = ray.get_runtime_context().get_node_id()
    return {
        node["NodeID"]: node["Resources"]
        for node in ray.nodes()
        if node["Alive"]
        and node["NodeID"] != here
        and (not own_nodes or ACTOR_RESOURCE in node["Resources"])
    }


class SharedPlaces:
    """The placement of engines and learner ranks that share a GPU, in turns or each a part of it.
    Engine i and rank i are in bundle i of a placement group, whose GPU no other process uses."""

    def __init__(self, bundles: Sequence[Mapping[str, float]], *, start_timeout_s: float) -> None:
        """Block until the cluster has resources for all bundles. Raises DeadlineExceeded."""
        self._group = placement_group(list(map(dict, bundles)), strategy="PACK")
        if not self._group.wait(start_timeout_s):
            raise DeadlineExceeded(
                f"waited {start_timeout_s:g} s for {len(bundles)} places of engines and learner "
                "ranks (cluster.start_timeout_s)."
            )
        self._engines = itertools.count()

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Ray's options for a learner rank's process."""
        return self._in_bundle(rank)

    def of_next_engine(self) -> dict[str, Any]:
        """Ray's options for the next engine's process. After the first of each bundle, an engine
        replaces a lost one: Ray finds the bundle with free resources."""
        index = next(self._engines)
        return self._in_bundle(index if index < len(self._group.bundle_specs) else ANY)

    def _in_bundle(self, index: int) -> dict[str, Any]:
        gpu = "GPU" in self._group.bundle_specs[max(index, 0)]
        return {
            "num_gpus": HALF if gpu else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            ),
        }


def shard_name(buffer: str, node_id: str) -> str:
    """The name of the shard of a node, under which other processes find it."""
    return f"{buffer}-shard-{node_id[:12]}"


def rendezvous(
    ranks: Sequence[Any], *, port: int, joined: bool, start_timeout_s: float
) -> tuple[str, int]:
    """The address at which the ranks of one learner meet: on rank 0's node in a cluster that was
    `joined`, on loopback in one of our own.

    `port` 0: any free one. Raises UserError if it is given and taken there.
    """
    if not joined:
        return "127.0.0.1", free_port(port)
    # rank 0 may have to wait for resources first
    host, free = get(
        ranks[0].address.remote(port),
        timeout_s=start_timeout_s,
        what="the learner's address",
        key="cluster.start_timeout_s",
    )
    return str(host), int(free)


def free_port(wanted: int = 0, host: str = "127.0.0.1") -> int:
    """A port of `host` that is free now. Raises UserError if `wanted` is given and taken, or if
    none is free."""
    for candidate in [wanted] if wanted else random.SystemRandom().sample(PORTS, 64):
        with socket.socket() as s:
            try:
                s.bind((host, candidate))
            except OSError:
                continue
            return candidate
    raise UserError(f"learner.port={wanted} is not free: choose another, or 0 for any free port.")
