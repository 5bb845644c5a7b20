"""A rollout actor's client."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from rlcore.cluster.calls import answer, call, kill
from rlcore.cluster.specs import Hosting
from rlcore.interfaces import Wake
from rlcore.loop.role_protocols import ActorClient
from rlcore.types import OnPublish, Request, WeightManifest

WHO = "its process"


class RayRolloutActor(ActorClient):
    """Weights have the deadline of a publication, every other call the deadline after which an
    actor counts as hung."""

    def __init__(
        self, handle: Any, name: str, started: Any, hosting: Hosting, *, ranks: int = 1
    ) -> None:
        """`ranks`: processes that hold the engine's model."""
        self.handle = handle
        self.ranks = ranks
        self.starting = [(started, f"rollout actor {name} to start")]
        self._hang_timeout_s = hosting.supervision.hang_timeout_s
        self._publish_timeout_s = hosting.schedule.publish_timeout_s

    async def _call(self, ref: Any, what: str) -> Any:
        key = "cluster.hang_timeout_s"
        return await call(ref, timeout_s=self._hang_timeout_s, what=what, key=key, who=WHO)

    async def _load(self, ref: Any, version: int) -> dict[str, float]:
        what, key = f"loading version {version}", "schedule.publish_timeout_s"
        limit = self._publish_timeout_s
        return dict(await call(ref, timeout_s=limit, what=what, key=key, who=WHO))

    async def submit(self, requests: Sequence[Request], begun: Any = None) -> None:
        # Ray passes on the object of the reference `begun` without a copy in this process
        more = () if begun is None else (begun,)
        ref = self.handle.submit.remote(list(requests), *more)
        await self._call(ref, f"taking {len(requests)} requests")

    async def abort(self, request_ids: Sequence[str]) -> None:
        ref = self.handle.abort.remote(list(request_ids))
        await self._call(ref, f"dropping {len(request_ids)} requests")

    async def cut(self, request_ids: Sequence[str]) -> tuple[list[str], Any]:
        ids, begun = self.handle.cut.options(num_returns=2).remote(list(request_ids))
        return list(await self._call(ids, f"giving up {len(request_ids)} requests")), begun

    async def open_requests(self) -> list[str]:
        return list(await self._call(self.handle.open_requests.remote(), "its open requests"))

    async def update_weights(
        self, manifest: WeightManifest, handle: Any, on_publish: OnPublish
    ) -> dict[str, float]:
        ref = self.handle.update_weights.remote(manifest, handle, on_publish)
        return await self._load(ref, manifest.version)

    async def prepare_weights(self, manifest: WeightManifest, on_publish: OnPublish) -> None:
        what, key = f"stopping for version {manifest.version}", "schedule.publish_timeout_s"
        ref = self.handle.prepare_weights.remote(manifest, on_publish)
        await call(ref, timeout_s=self._publish_timeout_s, what=what, key=key, who=WHO)

    async def finish_weights(self, version: int) -> dict[str, float]:
        return await self._load(self.handle.finish_weights.remote(), version)

    async def set_version(self, version: int) -> dict[str, float]:
        return await self._load(self.handle.set_version.remote(version), version)

    async def sleep(self) -> dict[str, float]:
        return await self._switch(self.handle.sleep.remote(), "its engine to sleep")

    async def awaken(self, what: Wake) -> dict[str, float]:
        return await self._switch(self.handle.wake.remote(what), f"its engine to wake ({what})")

    async def _switch(self, ref: Any, what: str) -> dict[str, float]:
        key, limit = "schedule.publish_timeout_s", self._publish_timeout_s
        return dict(await call(ref, timeout_s=limit, what=what, key=key, who=WHO))

    async def status(self) -> dict[str, Any]:
        return dict(await self._call(self.handle.status.remote(), "its heartbeat"))

    def kill(self) -> None:
        kill(self.handle)


class PendingReply:
    """A reference that may never be awaited; failures are converted as in `calls`."""

    def __init__(self, ref: Any, what: str) -> None:
        self._ref = ref
        self._what = what

    def __await__(self) -> Generator[Any, None, None]:
        yield from answer(self._ref, self._what, WHO).__await__()
