"""Starts new processes of rollout actors while the run continues."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from rlcore.errors import DeadlineExceeded, StageError
from rlcore.loop.clients import Spawned
from rlcore.loop.members import ActorPool, Member, Process
from rlcore.loop.roster import Roster
from rlcore.loop.timing import now


class Replacements:
    """Starts processes and waits for them, each in a task of its own."""

    def __init__(
        self,
        roster: Roster,
        start_timeout_s: float,
        *,
        catch_up: Callable[[Member], Awaitable[bool]],
        failed: Callable[[Member, Process, str], None],
        ended: Callable[[Exception | None], None],
        note: Callable[[str], None],
    ) -> None:
        """`catch_up`: loads the newest weights into a new process; whether that succeeded.
        `failed`: called with a process that did not start, and why. `ended`: called when one has
        joined, or with an error that no replacement can mend."""
        self._roster = roster
        self._limit = start_timeout_s
        self._catch_up = catch_up
        self._failed = failed
        self._ended = ended
        self._note = note
        self._tasks: set[asyncio.Task[None]] = set()

    def replace(self, member: Member) -> None:
        """Start another process under a member's name."""
        spawned = member.pool.spawn(member.name)
        member.process = Process(spawned.client)
        member.suspect = False
        self._await_start(member, spawned)

    def add(self, name: str, pool: ActorPool) -> None:
        """Start a further member."""
        spawned = pool.spawn(name)
        member = Member(name, pool, Process(spawned.client), healthy=False)
        self._roster.add(member)
        self._await_start(member, spawned)

    def _await_start(self, member: Member, spawned: Spawned) -> None:
        task = asyncio.create_task(self._join(member, spawned))
        self._tasks.add(task)
        task.add_done_callback(self._settle)

    async def _join(self, member: Member, spawned: Spawned) -> None:
        process = member.process
        await self._placed(member, spawned)
        try:
            async with asyncio.timeout(self._limit):
                await spawned.started
        except TimeoutError:
            limit = f"cluster.start_timeout_s={self._limit:g}"
            self._failed(member, process, f"waited {self._limit:g} s for its start ({limit}).")
            return
        except (DeadlineExceeded, StageError) as e:
            self._failed(member, process, str(e))
            return
        if not await self._catch_up(member) or member.process is not process:
            return  # it failed again, or was removed meanwhile
        member.healthy = True
        self._note(f"{member.name} is in the rotation with version {process.version}")

    async def _placed(self, member: Member, spawned: Spawned) -> None:
        """Wait for resources as long as other actors are working: a preempted node may come back
        an hour later."""
        asked = now()
        waiting = asyncio.ensure_future(spawned.placed)
        while not (await asyncio.wait([waiting], timeout=self._limit))[0]:
            self._note(
                f"{member.name} has waited {now() - asked:.0f} s for resources in the cluster"
            )
        # a process that died at once shows in `started`, with the reason
        with contextlib.suppress(Exception):
            waiting.result()

    def _settle(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        unexpected = None if error is None else StageError(str(error))
        self._ended(error if isinstance(error, Exception) else unexpected)

    async def close(self) -> None:
        """Stop waiting for processes."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
