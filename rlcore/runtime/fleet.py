"""The rollout actors: who holds which group, who is well, and what happens when one is not.

A sick actor (dead, hung past its deadline, or with weights that did not arrive) leaves the rotation at once. Its
replacement starts beside the run, which does not wait for it, and enters the rotation when the newest published
weights are proven on it. The groups that a sick actor held are `take_lost`: the controller hands out again what is
still missing of them. Adding and removing actors while the run goes on are the same two moves without a fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import ray

from rlcore.errors import DeadlineExceeded, StageError, UserError
from rlcore.runtime.cluster import RoleLost, call
from rlcore.types import OnPublish, Request, WeightManifest

POLICY = "policy"  # the learner's policy, among what a publication holds
Purpose = Literal["all", "training", "evaluation"]
AN_HOUR_S = 3600.0
Held = dict[int, list[Request]]  # group id -> requests


@dataclass(frozen=True, slots=True)
class Spawned:
    """A new actor process on its way."""

    handle: Any
    placed: Any  # reference that resolves when the cluster found room for it and its process runs
    started: Any  # reference that resolves when its engine is ready


@dataclass(slots=True)
class Member:
    """One rollout actor as the controller sees it."""

    name: str  # "<label>-<index>", stays when the process is replaced
    label: str
    spawn: Callable[[str], Spawned]  # starts a process of this kind under a name
    handle: Any
    version: int = -1  # last version whose arrival was proven on this process
    groups: Held = field(default_factory=dict)  # what it was given and has not completed
    status: dict[str, Any] = field(default_factory=dict)
    failures: list[float] = field(default_factory=list)  # when it fell sick within the last hour (monotonic)
    well: bool = True  # in the rotation
    purpose: Purpose = "all"  # what it is given: evaluation, everything else, or both
    weights: str | None = POLICY  # what of a publication it loads; None: its own weights are frozen

    def serves(self, group_id: int) -> bool:
        """Whether a group may be given to it; evaluation groups are negative."""
        return self.purpose == "all" or (self.purpose == "evaluation") == (group_id < 0)

    @property
    def load(self) -> int:
        """Requests handed to it whose group has not completed."""
        return sum(len(r) for r in self.groups.values())


@dataclass(frozen=True, slots=True)
class Publication:
    """The newest published weights: kept so that a replacement can be given them."""

    manifest: WeightManifest
    handle: Any
    others: Mapping[str, tuple[WeightManifest, Any]] = field(default_factory=dict)  # beside the policy's, by name

    def of(self, weights: str) -> tuple[WeightManifest, Any]:
        """Manifest and handle of one set of weights."""
        return (self.manifest, self.handle) if weights == POLICY else self.others[weights]


class Fleet:
    """Assignment, publishing and supervision of rollout actors. Holds references and counts, no payloads."""

    def __init__(
        self,
        members: Sequence[Member],
        *,
        on_publish: OnPublish,
        publish_timeout_s: float,
        hang_timeout_s: float,
        start_timeout_s: float,
        max_restarts: int,
        joined: bool,
        log: Callable[[str], None],
    ) -> None:
        """`joined`: members share a broadcast group for weights, which is lost with any one of them."""
        self.joined = joined
        self.members = list(members)
        self.on_publish: OnPublish = on_publish
        self.publish_timeout_s, self.hang_timeout_s = publish_timeout_s, hang_timeout_s
        self.start_timeout_s, self.max_restarts = start_timeout_s, max_restarts
        self.publication: Publication | None = None
        self.replacements = 0
        self._kinds = {m.label: m for m in members}
        self._numbers = self.sizes()  # names given out
        self._log = log
        self._lost: Held = {}
        self._joining: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None
        self._alone_since: float | None = None  # when the rotation became empty (monotonic)
        self._news = asyncio.Event()

    def rotation(self) -> list[Member]:
        """The members that may be given work."""
        return [m for m in self.members if m.well]

    def sizes(self) -> dict[str, int]:
        """How many members of each label there are, well or not."""
        return {label: sum(m.label == label for m in self.members) for label in self._kinds}

    # ---- work -----------------------------------------------------------------------------------------------------

    async def assign(self, groups: Held) -> None:
        """Hand groups to the least loaded healthy members: whole groups, ties by order, one message a member.

        What somebody holds already is taken from him first. While nobody is well the groups wait as lost ones. Raises
        UserError when an engine refuses a request; a member that does not answer is replaced.
        """
        await self._withdraw(groups)
        batches: dict[str, tuple[Member, list[Request]]] = {}
        for group_id, requests in sorted(groups.items()):
            rotation = [m for m in self.rotation() if m.serves(group_id)]
            if not rotation:
                self._lost[group_id] = requests
                continue
            member = min(rotation, key=lambda m: m.load)
            member.groups[group_id] = requests
            batches.setdefault(member.name, (member, []))[1].extend(requests)
        await asyncio.gather(*(self._submit(member, requests) for member, requests in batches.values()))

    async def _withdraw(self, groups: Mapping[int, Any]) -> None:
        """Have members drop what they are still sampling of these groups."""
        waiting = []
        for member in self.members:
            taken = [r for g in groups if g in member.groups for r in member.groups.pop(g)]
            if taken and member.well:
                ids = [r.request_id for r in taken]
                waiting.append(self._ask(member, "abort", ids, what=f"dropping {len(ids)} requests"))
        await asyncio.gather(*waiting)

    async def _submit(self, member: Member, requests: list[Request]) -> None:
        await self._ask(member, "submit", requests, what=f"taking {len(requests)} requests")

    async def _ask(self, member: Member, method: str, *args: Any, what: str, timeout_s: float | None = None) -> Any:
        """A call under a deadline; a member that fails it is replaced and the answer is None."""
        handle = member.handle
        key = "cluster.hang_timeout_s" if timeout_s is None else "schedule.publish_timeout_s"
        timeout_s = self.hang_timeout_s if timeout_s is None else timeout_s
        try:
            return await call(
                getattr(handle, method).remote(*args), timeout_s=timeout_s, what=what, key=key, who="its process"
            )
        except (DeadlineExceeded, StageError) as e:
            self.sicken(member, handle, str(e))
            return None

    def forget(self, live: set[int]) -> None:
        """Drop finished groups from the books; `live` are the incomplete ones (evaluation groups are negative)."""
        for m in self.members:
            m.groups = {g: r for g, r in m.groups.items() if g in live or g < 0}

    def forget_evaluation(self) -> None:
        for m in self.members:
            m.groups = {g: r for g, r in m.groups.items() if g >= 0}
        self._lost = {g: r for g, r in self._lost.items() if g >= 0}

    async def open_requests(self) -> set[str]:
        """Ids of the requests that members are still working on."""
        answers = await asyncio.gather(
            *(self._ask(m, "open_requests", what="its open requests") for m in self.rotation())
        )
        return {request_id for answer in answers for request_id in answer or ()}

    def take_lost(self) -> Held:
        """Groups that nobody works on any more, once; empty while nobody could take them."""
        lost = {g: r for g, r in self._lost.items() if any(m.serves(g) for m in self.rotation())}
        self._lost = {g: r for g, r in self._lost.items() if g not in lost}
        return lost

    # ---- weights --------------------------------------------------------------------------------------------------

    async def publish(self, publication: Publication) -> dict[str, float]:
        """Give every member the new weights at once; a member that fails to prove arrival is replaced.

        Whoever joins later loads them before it is given work. Returns the slowest member's seconds, in parts.
        """
        self.publication = publication
        results = await asyncio.gather(*(self._load(m) for m in self.rotation()))
        parts = [r for r in results if r]
        return {k: max(p[k] for p in parts) for k in parts[0]} if parts else {}

    async def _load(self, member: Member) -> dict[str, float] | None:
        assert self.publication is not None
        version, limit = self.publication.manifest.version, self.publish_timeout_s
        what = f"loading version {version}"
        took: dict[str, float] | None
        if member.weights is None:
            took = await self._ask(member, "stamp", version, limit, what=what, timeout_s=limit)
        else:
            weights = self.publication.of(member.weights)
            took = await self._ask(
                member, "update_weights", *weights, self.on_publish, limit, what=what, timeout_s=limit
            )
        if took is not None:
            member.version = version
        return took

    # ---- supervision ----------------------------------------------------------------------------------------------

    def sicken(self, member: Member, handle: Any, why: str) -> None:
        """Take the process `handle` of a member out of the rotation, kill it and start another under its name."""
        if member.handle is not handle or member not in self.members or self._failure is not None:
            return  # it was replaced or removed since
        self._out(member)
        self.replacements += 1
        reason = why.strip().splitlines()[0][:240]
        if self.joined:
            self._failure = RoleLost(f"{member.name} is lost, and with it the broadcast group of weights: {reason}")
            return
        now = time.monotonic()
        member.failures = [t for t in member.failures if now - t < AN_HOUR_S] + [now]
        if len(member.failures) > self.max_restarts:  # of one member: a node that goes takes many with it at once
            self._failure = StageError(
                f"{member.name} failed {len(member.failures)} times within an hour "
                f"(cluster.max_restarts={self.max_restarts}); last: {reason}"
            )
            return
        self._log(f"{member.name} is replaced: {reason}")
        self._start(member)

    def _out(self, member: Member) -> None:
        member.well, member.version, member.status = False, -1, {}
        self._lost |= member.groups
        member.groups = {}
        ray.kill(member.handle, no_restart=True)
        self._news.set()

    def _start(self, member: Member) -> None:
        spawned = member.spawn(member.name)
        member.handle = spawned.handle
        task = asyncio.create_task(self._join(member, spawned))
        self._joining.add(task)
        task.add_done_callback(self._joined)

    def _joined(self, task: asyncio.Task[None]) -> None:
        self._joining.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error if isinstance(error, Exception) else StageError(str(error))
        self._news.set()

    async def _join(self, member: Member, spawned: Spawned) -> None:
        """Wait for a new process, load the newest weights until they are the newest, and enter the rotation."""
        try:
            await self._placed(member, spawned)
            await call(
                spawned.started,
                timeout_s=self.start_timeout_s,
                what="its start",
                key="cluster.start_timeout_s",
                who="its process",
            )
        except (DeadlineExceeded, StageError) as e:
            self.sicken(member, spawned.handle, str(e))
            return
        while self.publication is not None and member.version != self.publication.manifest.version:
            loaded = await self._load(member)
            if loaded is None or member.handle is not spawned.handle or member not in self.members:
                return  # it fell sick again or was removed meanwhile
        member.well = True
        self._log(f"{member.name} is in the rotation with version {member.version}")

    async def _placed(self, member: Member, spawned: Spawned) -> None:
        """A preempted node may come back in an hour: room is waited for, as long as others are at work."""
        asked = time.monotonic()
        waiting = asyncio.wrap_future(spawned.placed.future())
        while not (await asyncio.wait([waiting], timeout=self.start_timeout_s))[0]:
            self._log(f"{member.name} waits for room in the cluster since {time.monotonic() - asked:.0f} s")
        with contextlib.suppress(Exception):  # a process that died at once shows in what it was started for
            waiting.result()

    async def watch(self) -> None:
        """One round of heartbeats. Raises when an actor failed too often, or none is well for too long."""
        await asyncio.gather(*(self._check(m) for m in self.rotation()))
        if self._failure is not None:
            raise self._failure
        if self.rotation():
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = time.monotonic()
        elif time.monotonic() - self._alone_since > self.start_timeout_s:
            raise DeadlineExceeded(
                f"waited {self.start_timeout_s:g} s for a rollout actor to be well (cluster.start_timeout_s)."
            )

    async def _check(self, member: Member) -> None:
        handle = member.handle
        status = await self._ask(member, "status", what="its heartbeat")
        if status is None or member.handle is not handle:
            return
        member.status = status
        if status["error"]:
            self.sicken(member, handle, status["error"])
        elif status["heartbeat_age_s"] > self.hang_timeout_s:
            self.sicken(member, handle, f"its engine thread stood still for {self.hang_timeout_s:g} s")

    async def news(self, timeout_s: float) -> None:
        """Return when a member fell sick, joined or left, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), timeout_s)
        self._news.clear()

    # ---- size -----------------------------------------------------------------------------------------------------

    def resize(self, counts: Mapping[str, int]) -> None:
        """Make the fleet have `counts` members of each label named. The run goes on meanwhile.

        New members enter the rotation when they hold the newest weights; groups of removed ones are handed out again.
        Raises UserError for an unknown label or a fleet without members.
        """
        if self.joined:
            raise UserError("cluster.transport=nccl or gloo fixes the actors at the start: use object_store or disk.")
        for label, count in counts.items():
            if label not in self._kinds:
                raise UserError.choice("actor", label, self._kinds, "the run has no actors of that label")
            if count < 0:
                raise UserError(f"actor.{label}.count={count} is negative.")
        now = {label: [m for m in self.members if m.label == label] for label in self._kinds}
        at_work = {label: members for label, members in now.items() if self._kinds[label].purpose != "evaluation"}
        if not sum(counts.get(label, len(members)) for label, members in at_work.items()):
            raise UserError("a run needs at least one rollout actor: leave one of actor.*.count at 1 or more.")
        for label, count in counts.items():
            for member in now[label][count:]:
                self.members.remove(member)
                self._out(member)
                self._log(f"{member.name} is removed")
            for _ in range(count - len(now[label])):
                name = f"{label}-{self._numbers[label]}"
                self._numbers[label] += 1
                kind = self._kinds[label]
                member = Member(name, label, kind.spawn, None, well=False, purpose=kind.purpose, weights=kind.weights)
                self.members.append(member)
                self._start(member)
                self._log(f"{name} is being added")

    async def close(self) -> None:
        """Stop waiting for members that are on their way."""
        for task in list(self._joining):
            task.cancel()
        await asyncio.gather(*self._joining, return_exceptions=True)
