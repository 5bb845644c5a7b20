"""The replay buffer as the controller calls it."""

from __future__ import annotations

from typing import Any

from rlcore.runtime.cluster import call

Missing = dict[int, tuple[str, tuple[int, ...]]]  # group id -> (prompt id, indices of samples that have not arrived)


class BufferClient:
    """Its actor handle, every call under the deadline `schedule.publish_timeout_s`."""

    def __init__(self, handle: Any, *, timeout_s: float) -> None:
        self.handle, self._timeout_s = handle, timeout_s

    async def call(self, method: str, *args: Any, what: str) -> Any:
        """The answer of one of the buffer's methods; `what` is waited for. Raises RoleLost or DeadlineExceeded."""
        return await call(
            getattr(self.handle, method).remote(*args),
            timeout_s=self._timeout_s,
            what=what,
            key="schedule.publish_timeout_s",
            who="the replay buffer",
        )

    async def in_flight(self) -> Missing:
        """Groups that were admitted and are not whole."""
        return dict(await self.call("in_flight", what="the groups in flight"))
