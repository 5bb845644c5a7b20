"""The ranks of one learner as the controller calls them: all at once, under a deadline, one answer."""

from __future__ import annotations

import asyncio
from typing import Any

from rlcore.errors import DeadlineExceeded
from rlcore.runtime.cluster import LOST_RANK_GRACE_S, RoleLost, call


class Ranks:
    """Handles of data-parallel ranks. A learner's methods are collective, so every call goes to all of them."""

    def __init__(self, handles: list[Any], *, timeout_s: float, name: str = "learner") -> None:
        self.handles, self.timeout_s, self.name = handles, timeout_s, name

    async def call(self, method: str, *args: Any, what: str, per_rank: list[tuple[Any, ...]] | None = None) -> Any:
        """The same method on every rank; rank 0's answer. Of several failures the loss of a rank is the one told.

        Raises RoleLost for a rank that died or missed the deadline: it may hang in a collective for ever.
        """
        asked = [
            asyncio.create_task(
                call(
                    getattr(handle, method).remote(*(per_rank[i] if per_rank else args)),
                    timeout_s=self.timeout_s,
                    what=what,
                    key="schedule.step_timeout_s",
                    who=f"{self.name} rank {i}",
                )
            )
            for i, handle in enumerate(self.handles)
        ]
        try:
            _, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
            if waiting:  # a rank fails within moments of another's death, and may be heard first
                await asyncio.wait(waiting, timeout=LOST_RANK_GRACE_S)
            errors = [e for t in asked if t.done() and (e := t.exception()) is not None]
            for error in sorted(errors, key=lambda e: not isinstance(e, RoleLost)):
                if isinstance(error, DeadlineExceeded):
                    raise RoleLost(f"the {self.name} hangs: {str(error).rstrip('.')}") from error
                raise error
            return asked[0].result()
        finally:
            for task in asked:
                task.cancel()


def deal(groups: list[tuple[int, int]], ranks: int) -> list[list[int]]:
    """Split (group id, tokens) into `ranks` lists of whole groups with near-equal tokens, longest first."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for group_id, tokens in sorted(groups, key=lambda g: (-g[1], g[0])):
        place = loads.index(min(loads))
        shares[place].append(group_id)
        loads[place] += tokens
    return [sorted(share) for share in shares]
