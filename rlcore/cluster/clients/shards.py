"""Shards of the buffer: one for each node with rollout actors but the driver's, where the buffer
itself is.

A process has the name of its node's shard, under which actors find it. A shard is named after that
and the number of the process, "NAME#2": the records of an earlier process are lost with it."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from rlcore.buffer.journal import (
    JournalError,
    RecordFile,
    file_of,
    read_record_file,
    write_record_file,
)
from rlcore.buffer.shard import Shard, ShardReply, ShardReport, ShardReporter
from rlcore.cluster.calls import call, kill
from rlcore.cluster.clients.buffer import RayBuffer
from rlcore.cluster.placement import actor_class, on_node, other_actor_nodes, shard_name
from rlcore.cluster.specs import Hosting
from rlcore.errors import DeadlineExceeded, RoleLost, StageError
from rlcore.references import ShardLost
from rlcore.types import Score


class ShardActor:
    """Takes the records of this node's rollout actors and the scores of its graders, reports
    them to the buffer, and gives the records to learner ranks. Drops what the buffer has released
    when a reply says so."""

    def __init__(self, name: str, buffer: Any) -> None:
        self._shard = Shard(name)
        self._buffer = buffer
        self._reporter = ShardReporter(self._shard, self._send)

    async def _send(self, name: str, report: ShardReport) -> ShardReply:
        reply: ShardReply = await self._buffer.add_report.remote(name, report)
        return reply

    async def add_records(self, records: list[bytes]) -> None:
        """Serialised training trajectories; answers when the buffer has the report."""
        self._reporter.put_records(records)
        await self._reporter.flush()

    async def add_scores(self, scores: list[Score]) -> None:
        """Scores of training episodes; answers when the buffer has the report."""
        self._reporter.put_scores(scores)
        await self._reporter.flush()

    async def fetch(self, shard: str, keys: list[int]) -> list[bytes]:
        """Records by key. Raises ShardLost for one that was dropped, or that another process kept
        under this one's name."""
        return self._kept(shard, keys)

    async def write(self, shard: str, keys: list[int], folder: str) -> str:
        """Write records to a checkpoint's folder, in a thread; returns their checksum. Raises as
        `fetch` does, and OSError."""
        records, path = self._kept(shard, keys), Path(folder) / file_of(shard)
        return await asyncio.to_thread(write_record_file, path, records)

    async def read(self, shard: str, files: list[RecordFile], folder: str) -> list[int]:
        """Keep the records of files of a checkpoint, read in a thread; returns the key of each
        file's first record. Raises ShardLost as `fetch` does, and JournalError, keeping nothing."""
        self._check(shard)
        read = await asyncio.to_thread(lambda: [read_record_file(Path(folder), f) for f in files])
        return [self._shard.keep(records) for records in read]

    def _kept(self, shard: str, keys: list[int]) -> list[bytes]:
        self._check(shard)
        return self._shard.get(keys)

    def _check(self, shard: str) -> None:
        if shard != self._shard.name:
            raise ShardLost(f"{shard} is lost: {self._shard.name} has taken its place")

    async def pid(self) -> int:
        """This process."""
        return os.getpid()

    async def alive(self) -> int:
        """A heartbeat; bytes that are kept."""
        self._shard.drop(await self._buffer.released.remote(self._shard.name))
        return self._shard.bytes


FETCH_TIMEOUT_S = 300.0
AGAIN_S = 10.0  # after which a node that is still there is given another shard


def fetch_records(
    keys: Mapping[str, Sequence[int]], timeout_s: float = FETCH_TIMEOUT_S
) -> dict[str, list[bytes]]:
    """Records by shard and key, from all shards at once. Raises ShardLost, also for a shard that
    does not answer in time."""
    try:
        refs = {s: _process(s).fetch.remote(s, list(its)) for s, its in keys.items()}
        found: list[list[bytes]] = ray.get(list(refs.values()), timeout=timeout_s)
    except (ValueError, RayError) as e:  # there is no actor of that name any more, or it is dying
        _forget(keys)
        raise ShardLost(f"a node of the run is lost with its records: {type(e).__name__}") from e
    return dict(zip(refs, found, strict=True))


def write_shards(
    folder: Path, keys: Mapping[str, Sequence[int]], timeout_s: float
) -> dict[str, str]:
    """Have every shard write these of its records to the folder; returns the checksums of the
    files. Raises ShardLost, DeadlineExceeded and OSError."""
    try:
        refs = {s: _process(s).write.remote(s, list(its), str(folder)) for s, its in keys.items()}
        made: list[str] = ray.get(list(refs.values()), timeout=timeout_s)
    except GetTimeoutError as e:
        raise _late(timeout_s, "write", folder, "checkpoint.write_timeout_s") from e
    except RayTaskError as e:
        raise e.as_instanceof_cause() from e
    except (ValueError, RayError) as e:
        _forget(keys)
        raise ShardLost(f"a node of the run is lost with its records: {type(e).__name__}") from e
    return dict(zip(refs, made, strict=True))


def read_shards(
    folder: Path, files: Mapping[str, Sequence[RecordFile]], timeout_s: float
) -> dict[str, list[int]]:
    """Have every shard read these files of a checkpoint and keep their records; returns the key of
    each file's first record. Raises RoleLost if one is lost meanwhile, DeadlineExceeded and
    JournalError."""
    try:
        refs = {s: _process(s).read.remote(s, list(its), str(folder)) for s, its in files.items()}
        made: list[list[int]] = ray.get(list(refs.values()), timeout=timeout_s)
    except GetTimeoutError as e:
        raise _late(timeout_s, "read", folder, "cluster.start_timeout_s") from e
    except RayTaskError as e:
        if isinstance(e.cause, JournalError):
            raise e.cause from e
        raise RoleLost(f"a shard could not read its part of {folder}: {e.cause}") from e
    except (ValueError, RayError) as e:
        _forget(files)
        raise RoleLost(f"a shard was lost while it read its part of {folder}") from e
    return dict(zip(refs, made, strict=True))


def _late(timeout_s: float, does: str, folder: Path, key: str) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"waited {timeout_s:g} s for shards to {does} what is theirs of {folder} "
        f"({key}={timeout_s:g})."
    )


# The shards that this process has asked before. A handle by name is news to Ray each time: it asks
# the head for the actor's address, and calls wait while the head does not say it, as after a node
# was away. A process that is replaced fails the call, and is looked for again.
_found: dict[str, Any] = {}


def _process(shard: str) -> Any:
    if shard not in _found:
        _found[shard] = ray.get_actor(shard.partition("#")[0])
    return _found[shard]


def _forget(shards: Iterable[str]) -> None:
    for shard in shards:
        _found.pop(shard, None)


class RayShards:
    """The shards of a run. A process that was lost without its node is replaced; until then the
    actors of the node send to the buffer."""

    def __init__(self, buffer: RayBuffer, hosting: Hosting) -> None:
        self._buffer = buffer
        self._limit_s = hosting.supervision.hang_timeout_s
        self._own_nodes = hosting.own_nodes
        self._most = 1 + hosting.supervision.max_restarts  # processes of a node
        self._handles: dict[str, Any] = {}  # by name of the shard
        self._nodes: dict[str, str] = {}  # likewise
        self._started: Counter[str] = Counter()  # processes by node
        self._lost_at: dict[str, float] = {}  # nodes without one
        self.start()

    def start(self) -> None:
        """Start the shards of nodes that are new or whose process was lost. A node that is lost
        itself is listed for some seconds more."""
        now = time.monotonic()
        for node_id in other_actor_nodes(own_nodes=self._own_nodes):
            lost_at = self._lost_at.get(node_id, -math.inf)
            missing = not self._started[node_id] or node_id in self._lost_at
            if missing and now - lost_at >= AGAIN_S and self._started[node_id] < self._most:
                self._lost_at.pop(node_id, None)
                self._spawn(node_id)

    def _spawn(self, node_id: str) -> None:
        self._started[node_id] += 1
        process, place = shard_name(self._buffer.name, node_id), on_node(node_id)
        actor = actor_class(ShardActor, num_cpus=0, name=process, scheduling_strategy=place)
        name = f"{process}#{self._started[node_id]}"
        self._handles[name] = actor.remote(name, self._buffer.handle)
        self._nodes[name] = node_id

    @property
    def names(self) -> list[str]:
        """Names of the shards that are not known to be lost."""
        return list(self._handles)

    async def watch(self, note: Callable[[str], None]) -> list[str]:
        """A heartbeat of all shards; returns the names of lost ones, once each. `note` is told of
        silent ones."""
        await asyncio.to_thread(self.start)
        names = self.names
        alive = await asyncio.gather(*(self._alive(name, note) for name in names))
        lost = [name for name, lives in zip(names, alive, strict=True) if not lives]
        for name in lost:
            self._lost_at[self._nodes.pop(name)] = time.monotonic()
            await asyncio.to_thread(kill, self._handles.pop(name))  # waits for Ray's head
        return lost

    async def _alive(self, name: str, note: Callable[[str], None]) -> bool:
        ref, what = self._handles[name].alive.remote(), f"a heartbeat of {name}"
        key = "cluster.hang_timeout_s"
        try:
            await call(ref, timeout_s=self._limit_s, what=what, key=key, who=name, note=note)
        except (StageError, DeadlineExceeded):
            return False
        return True

    def kill(self) -> None:
        """End all shards."""
        for handle in self._handles.values():
            kill(handle)
