"""Shards of the buffer: one for each node with rollout actors but the driver's, where the buffer
itself is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from rlcore.cluster.actors.shard import ShardActor
from rlcore.cluster.calls import call
from rlcore.cluster.clients.buffer import RayBuffer
from rlcore.cluster.jobs import Hosting
from rlcore.cluster.placement import actor_class, on_node, other_actor_nodes, shard_name
from rlcore.errors import DeadlineExceeded, StageError
from rlcore.references import ShardLost

FETCH_TIMEOUT_S = 300.0


def fetch_records(keys: Mapping[str, Sequence[int]]) -> dict[str, list[bytes]]:
    """Records by shard and key, from all shards at once. Raises ShardLost."""
    try:
        refs = {s: ray.get_actor(s).fetch.remote(list(its)) for s, its in keys.items()}
        found: list[list[bytes]] = ray.get(list(refs.values()), timeout=FETCH_TIMEOUT_S)
    except (ValueError, RayError) as e:  # there is no actor of that name any more, or it is dying
        raise ShardLost(f"a node of the run is lost with its records: {type(e).__name__}") from e
    return dict(zip(refs, found, strict=True))


class RayShards:
    """The shards that there are. One that is lost is not started again: the actors of its node then
    send to the buffer."""

    def __init__(self, buffer: RayBuffer, hosting: Hosting) -> None:
        self._buffer = buffer
        self._limit_s = hosting.supervision.hang_timeout_s
        self._own_nodes = hosting.own_nodes
        self._handles: dict[str, Any] = {}  # by name
        self._known: set[str] = set()  # nodes that have had one
        self.start()

    def start(self) -> None:
        """Start the shards of nodes that are new."""
        for node_id in other_actor_nodes(own_nodes=self._own_nodes):
            if node_id not in self._known:
                self._known.add(node_id)
                name, place = shard_name(self._buffer.name, node_id), on_node(node_id)
                shard = actor_class(ShardActor, num_cpus=0, name=name, scheduling_strategy=place)
                self._handles[name] = shard.remote(name, self._buffer.handle)

    async def watch(self) -> list[str]:
        """A heartbeat of all; the names of those that are lost, once each."""
        await asyncio.to_thread(self.start)
        names = list(self._handles)
        alive = await asyncio.gather(*(self._alive(name) for name in names))
        lost = [name for name, lives in zip(names, alive, strict=True) if not lives]
        for name in lost:
            _kill(self._handles.pop(name))
        return lost

    async def _alive(self, name: str) -> bool:
        ref, what = self._handles[name].alive.remote(), f"a heartbeat of {name}"
        key = "cluster.hang_timeout_s"
        try:
            await call(ref, timeout_s=self._limit_s, what=what, key=key, who=name)
        except (StageError, DeadlineExceeded):
            return False
        return True

    def kill(self) -> None:
        """End all of them."""
        for handle in self._handles.values():
            _kill(handle)


def _kill(handle: Any) -> None:
    with contextlib.suppress(RayError):
        ray.kill(handle)
