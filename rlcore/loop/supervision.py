"""Supervision of rollout actors: their health, and the replacement of failed ones.

A failed actor (dead, hung past its deadline, or with weights that did not arrive) leaves the
rotation at once and is replaced. One that is merely silent becomes a suspect first: it keeps its
work, which is also given to another actor, and gets no more until it answers. Nothing waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rlcore.errors import DeadlineExceeded, RoleLost, StageError, UserError
from rlcore.loop.members import ActorPool, Member, Process, Roster
from rlcore.loop.role_protocols import ActorClient, Spawned
from rlcore.loop.specs import SupervisionSpec
from rlcore.loop.timing import TurnLimit, now


class Replacements:
    """Starts processes and waits for them, each in a separate task."""

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
        """`catch_up`: loads the newest weights into a new process and returns whether that
        succeeded. `failed`: called with a process that did not start, and why. `ended`: called when
        one has joined, or with an error that no replacement can mend."""
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


AN_HOUR_S = 3600.0
ANSWER_S = 1.0  # heartbeats that come within it are judged in the same round
SLOW_STEPS = 10.0  # an engine thread is silent when it takes so many times its mean step
REASON_CHARS = 240  # of what a process raised, in a note
T = TypeVar("T")


class Supervisor:
    """Heartbeats, suspicions and failures of the members of a roster."""

    def __init__(
        self,
        roster: Roster,
        spec: SupervisionSpec,
        *,
        joined: bool,
        catch_up: Callable[[Member], Awaitable[bool]],
        note: Callable[[str], None],
        replaces: bool = True,
    ) -> None:
        """`joined`: weights come to all members at once, with the next publication only.
        `catch_up`: loads the newest weights into a new process and returns whether that succeeded.
        `replaces`: there are always resources for a new process in place of a lost one."""
        self.replacements = 0
        self._replaces = replaces
        self._roster = roster
        self._spec = spec
        self._joined = joined
        self._note = note
        self._starting = Replacements(
            roster,
            spec.start_timeout_s,
            catch_up=catch_up,
            failed=self.mark_failed,
            ended=self._end,
            note=note,
        )
        self._failure: Exception | None = None
        self._alone_since: float | None = None  # when the last healthy member was lost
        self._news = asyncio.Event()
        self._turns = TurnLimit()

    async def ask(
        self, member: Member, process: Process, call: Callable[[ActorClient], Awaitable[T]]
    ) -> T | None:
        """Call a member's process; one that fails the call is replaced and the answer is None, as
        it is when `process` was replaced before."""
        if member.process is not process:
            return None
        await self._turns.next()
        if member.process is not process:
            return None
        try:
            return await call(process.client)
        except UserError as e:  # any other process would refuse it too
            self._end(e)
        except (DeadlineExceeded, StageError) as e:
            self.mark_failed(member, process, str(e))
        return None

    def mark_failed(self, member: Member, process: Process, why: str) -> None:
        """Take a member's process out of the rotation, kill it and start another under its name."""
        current = member.process is process and member in self._roster.members
        if not current or self._failure is not None:
            return  # it has been replaced or removed in the meantime
        self.retire(member)
        self.replacements += 1
        reason = why.strip().splitlines()[0][:REASON_CHARS]
        at, limit = now(), self._spec.max_restarts
        member.failures = [t for t in member.failures if at - t < AN_HOUR_S] + [at]
        if not self._replaces:
            self._end(
                RoleLost(f"{member.name} is lost, and its GPU is the learner's too: {reason}")
            )
        elif self._joined and not self._others_serve(member):
            # its replacement would wait for a publication, which waits for its samples
            lost = f"{member.name} is lost, and no other actor of its purpose is left: {reason}"
            self._end(RoleLost(lost))
        # counted per member, because a lost node takes many members with it
        elif len(member.failures) > limit:
            often = f"{member.name} failed {len(member.failures)} times within an hour"
            self._end(StageError(f"{often} (cluster.max_restarts={limit}); last: {reason}"))
        else:
            self._note(f"{member.name} is replaced: {reason}")
            self._starting.replace(member)

    def _others_serve(self, member: Member) -> bool:
        """Return whether another healthy member can do the work of this one."""
        purposes = {member.pool.purpose, "all"}
        return any(m.pool.purpose in purposes for m in self._roster.healthy() if m is not member)

    def retire(self, member: Member) -> None:
        """Take a member out of the rotation and end its process. Its groups are lost, but for those
        that another member works on too."""
        member.healthy = False
        work, waiting = self._roster.work, self._roster.waiting
        held = work.take_all(member)
        waiting.drop(held)
        waiting.lost |= {g: r for g, r in held.items() if not work.holders(g)}
        member.process.close()
        member.process.client.kill()
        self._news.set()

    def add(self, name: str, pool: ActorPool) -> None:
        """Start a further member."""
        self._starting.add(name, pool)

    def _end(self, error: Exception | None) -> None:
        """Wake waiters; an error ends the run at the next `watch`."""
        self._failure = self._failure or error
        self._news.set()

    async def watch(self) -> None:
        """One round of heartbeats; does not wait for silent members.

        Raises when an actor failed too often, an engine refused a request, or no actor has been
        healthy for cluster.start_timeout_s.
        """
        for member in self._roster.healthy():
            if member.process.checking is None:
                member.process.asked_at = now()
                member.process.checking = asyncio.create_task(self._check(member))
        asked = [m.process.checking for m in self._roster.healthy() if m.process.checking]
        if asked:
            await asyncio.wait(asked, timeout=ANSWER_S)
        for member in self._roster.healthy():
            self._judge(member)
        self._raise()

    async def _check(self, member: Member) -> None:
        process, limit = member.process, self._spec.hang_timeout_s
        try:
            status = await self.ask(member, process, lambda client: client.status())
        finally:
            process.checking = None
        if status is None:
            return
        process.status = status
        process.beats.add(status["busy_s"])
        if status["error"]:
            self.mark_failed(member, process, status["error"])
        elif status["heartbeat_age_s"] > limit:
            self.mark_failed(
                member, process, f"its engine thread has not responded for {limit:g} s"
            )

    def _judge(self, member: Member) -> None:
        """Return whether a member is silent, by its overdue heartbeat and by its engine's."""
        process, limit = member.process, self._spec.suspect_after_s
        silence = 0.0 if process.checking is None else now() - process.asked_at
        suspect = silence > limit or _engine_stands_still(process, limit)
        if suspect and not member.suspect:
            self._roster.waiting.delayed |= member.groups
            others = f": its {len(member.groups)} groups are also given to others"
            told = others if member.groups else ""
            self._note(f"{member.name} has not answered for {limit:g} s{told}")
        elif member.suspect and not suspect:
            for group_id in member.groups:
                self._roster.waiting.delayed.pop(group_id, None)
            self._note(f"{member.name} answers again")
        if suspect != member.suspect:
            member.suspect = suspect
            self._news.set()

    def check(self) -> None:
        """Raise the failure that ends the run, if there was one."""
        if self._failure is not None:
            raise self._failure

    def _raise(self) -> None:
        limit = self._spec.start_timeout_s
        self.check()
        if self._roster.healthy():
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now()
        elif now() - self._alone_since > limit:
            raise DeadlineExceeded(
                f"waited {limit:g} s for a healthy rollout actor (cluster.start_timeout_s)."
            )

    async def news(self, timeout_s: float) -> None:
        """Return when a member failed, joined, was removed or fell silent, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        self._news.clear()

    async def close(self) -> None:
        """Stop waiting for members."""
        for member in self._roster.members:
            member.process.close()
        await self._starting.close()


def _engine_stands_still(process: Process, limit: float) -> bool:
    """Return whether the engine's thread is silent although its process answers: a slow engine is
    not silent, nor one that loads weights."""
    status = process.status
    if not status or process.loading is not None:
        return False
    step_s = status["busy_s"] / max(status["steps"], 1)
    return bool(status["heartbeat_age_s"] > max(limit, SLOW_STEPS * step_s))
