"""The ranks of one learner: every call goes to all of them, under a deadline, with one answer."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import ray

from rlcore.cluster.calls import LOST_RANK_GRACE_S, call, get
from rlcore.errors import DeadlineExceeded, RoleLost
from rlcore.types import POLICY

Ask = Callable[[Any], Any]  # an actor handle -> the reference of a call
Share = TypeVar("Share")
KEY = "schedule.step_timeout_s"


class RankGroup:
    """The ranks of a learner, whose methods are collective, so that each is called on all of them.

    `name`: the set of weights that the group is for, "policy" or a companion's. `shares`: of a
    batch; neighbouring ranks have the same share where they are fewer than the ranks.
    """

    def __init__(
        self, name: str, handles: Sequence[Any], *, timeout_s: float, shares: int | None = None
    ) -> None:
        self.name = name
        self.handles = list(handles)
        self.shares = shares or len(self.handles)
        self.timeout_s = timeout_s
        self.title = "learner" if name == POLICY else f"{name} learner"

    async def call(self, ask: Ask, what: str) -> Any:
        """The same call on every rank; rank 0's answer. If several ranks fail, the loss of a rank
        takes precedence.

        Raises RoleLost for a rank that died or missed the deadline: it may hang in a collective,
        which nothing else can interrupt.
        """
        return await self.call_each([ask] * len(self.handles), what)

    async def call_each(self, asks: Sequence[Ask], what: str) -> Any:
        """The same with a call of its own for each rank."""
        return (await self._answers(asks, what))[0]

    async def call_all(self, ask: Ask, what: str) -> list[Any]:
        """The same call on every rank; all answers."""
        return await self._answers([ask] * len(self.handles), what)

    async def _answers(self, asks: Sequence[Ask], what: str) -> list[Any]:
        asked = [
            asyncio.create_task(
                call(
                    ask(handle),
                    timeout_s=self.timeout_s,
                    what=what,
                    key=KEY,
                    who=f"{self.title} rank {i}",
                )
            )
            for i, (ask, handle) in enumerate(zip(asks, self.handles, strict=True))
        ]
        try:
            _, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
            if waiting:  # a rank fails soon after another one dies, and its error may arrive first
                await asyncio.wait(waiting, timeout=LOST_RANK_GRACE_S)
            errors = [e for t in asked if t.done() and (e := t.exception()) is not None]
            for error in sorted(errors, key=lambda e: not isinstance(e, RoleLost)):
                if isinstance(error, DeadlineExceeded):
                    raise RoleLost(f"the {self.title} hangs: {str(error).rstrip('.')}") from error
                raise error
            return [task.result() for task in asked]
        finally:
            for task in asked:
                task.cancel()

    def call_now(self, asks: Sequence[Ask], what: str) -> list[Any]:
        """The blocking version, outside an event loop: the answers of all ranks."""
        refs = [ask(handle) for ask, handle in zip(asks, self.handles, strict=True)]
        try:
            return list(get(refs, timeout_s=self.timeout_s, what=what, key=KEY))
        except DeadlineExceeded as e:
            raise RoleLost(f"the {self.title} hangs: {str(e).rstrip('.')}") from e

    def of_each(self, shares: Sequence[Share]) -> list[Share]:
        """The share of each rank, of all shares of a batch."""
        same = len(self.handles) // self.shares
        return [share for share in shares for _ in range(same)]

    def roles(self) -> list[tuple[Any, str]]:
        """Every rank's handle, by the name that messages give it."""
        return [(handle, f"{self.title} rank {i}") for i, handle in enumerate(self.handles)]

    def kill(self) -> None:
        """End all ranks at once."""
        for handle in self.handles:
            ray.kill(handle)


def deal(groups: Sequence[tuple[int, int]], count: int) -> list[list[int]]:
    """Split (group id, tokens) into `count` lists of whole groups with near-equal tokens, longest
    first."""
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, place) for place in range(count)]  # a heap: of equal loads the first
    for group_id, tokens in sorted(groups, key=lambda g: (-g[1], g[0])):
        load, place = loads[0]
        shares[place].append(group_id)
        heapq.heapreplace(loads, (load + tokens, place))
    return [sorted(share) for share in shares]
