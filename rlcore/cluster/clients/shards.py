"""Shards of the buffer: one for each node with rollout actors but the driver's, where the buffer
itself is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlcore.cluster.actors.shard import ShardActor
from rlcore.cluster.calls import call
from rlcore.cluster.clients.buffer import RayBuffer
from rlcore.cluster.jobs import Hosting
from rlcore.cluster.placement import actor_class
from rlcore.errors import DeadlineExceeded, StageError
from rlcore.launch.specs import ACTOR_RESOURCE
from rlcore.references import ShardLost

FETCH_TIMEOUT_S = 300.0
MAX_UNDELIVERED = 64  # messages in transit above which delivery waits
RECHECK_S = 1.0


def shard_name(buffer: str, node_id: str) -> str:
    """The name of the shard of a node, under which other processes find it."""
    return f"{buffer}-shard-{node_id[:12]}"


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
        self._here = ray.get_runtime_context().get_node_id()
        self._handles: dict[str, Any] = {}  # by name
        self._known: set[str] = {self._here}  # nodes that were looked at
        self.start()

    def start(self) -> None:
        """Start the shards of nodes that are new."""
        for node in ray.nodes():
            node_id = node["NodeID"]
            if not node["Alive"] or node_id in self._known:
                continue
            self._known.add(node_id)
            if not self._own_nodes or ACTOR_RESOURCE in node["Resources"]:
                name = shard_name(self._buffer.name, node_id)
                place = NodeAffinitySchedulingStrategy(node_id, soft=False)
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


class RecordOutlet:
    """Where a rollout actor's records go: the shard of its node, or the buffer where there is none.

    Waits while too much of what it sent has not arrived. What a dead shard did not take goes to the
    buffer.
    """

    def __init__(self, buffer: Any, buffer_name: str) -> None:
        self._buffer = buffer
        self._name = shard_name(buffer_name, ray.get_runtime_context().get_node_id())
        self._shard: Any = None
        self._failed = False
        self._sent: dict[Any, list[bytes]] = {}  # by reference of the call

    def __call__(self, records: list[bytes]) -> None:
        self._send(records)
        while len(self._sent) > MAX_UNDELIVERED:
            self._settle(RECHECK_S)
        self._settle(0.0)

    def _send(self, records: list[bytes]) -> None:
        target = self._target()
        self._sent[target.add_records.remote(records)] = records if target is self._shard else []

    def _target(self) -> Any:
        if self._shard is None and not self._failed:
            with contextlib.suppress(ValueError):  # there is none, or not yet
                self._shard = ray.get_actor(self._name)
        return self._buffer if self._shard is None else self._shard

    def _settle(self, timeout_s: float) -> None:
        """Look at what has arrived since."""
        waiting = list(self._sent)
        done, _ = ray.wait(
            waiting, num_returns=len(waiting) if not timeout_s else 1, timeout=timeout_s
        )
        for ref in done:
            records = self._sent.pop(ref)
            if records and _refused(ref):
                self._shard, self._failed = None, True
                self._send(records)


def _refused(ref: Any) -> bool:
    """Whether the process died before it answered; what it raised is its own to report."""
    try:
        ray.get(ref)
    except RayActorError:
        return True
    except RayError:
        return False
    return False
