"""The replay buffer's client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.cluster.calls import call, get, kill
from rlcore.cluster.specs import Hosting
from rlcore.loop.role_protocols import BufferClient, derived


@derived(BufferClient)
class RayBuffer(BufferClient):
    """The process's methods, every call under the deadline `schedule.publish_timeout_s`."""

    def __init__(self, handle: Any, name: str, started: Any, hosting: Hosting) -> None:
        """`name`: under which other processes find the actor. `started`: its answer to `start`."""
        self.handle = handle
        self.name = name
        self.starting = [(started, "the replay buffer to start")]
        self._timeout_s = hosting.schedule.publish_timeout_s
        self._start_timeout_s = hosting.supervision.start_timeout_s

    async def _forward(
        self, name: str, what: str, args: Sequence[Any], given: Mapping[str, Any]
    ) -> Any:
        return await call(
            getattr(self.handle, name).remote(*args, **given),
            timeout_s=self._timeout_s,
            what=what,
            key="schedule.publish_timeout_s",
            who="the replay buffer",
        )

    async def save(self, folder: str, *, timeout_s: float) -> None:
        ref = self.handle.save.remote(folder, timeout_s=timeout_s)
        what, key = "writing the buffer journal", "checkpoint.write_timeout_s"
        await call(ref, timeout_s=timeout_s, what=what, key=key, who="the replay buffer")

    def load(self, folder: str, shards: Sequence[str]) -> None:
        """Continue from what `save` wrote; these shards read the shards' files. Blocks: before the
        loop runs."""
        limit = self._start_timeout_s
        get(
            self.handle.load.remote(folder, list(shards), limit),
            timeout_s=limit,
            what="loading the buffer journal",
            key="cluster.start_timeout_s",
        )

    def kill(self) -> None:
        """End the process at once."""
        kill(self.handle)
