"""The rollout actors of a run: their weights, number, assignments and supervision."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from rlcore.errors import UserError
from rlcore.interfaces import Wake
from rlcore.loop.assignment import Assignments
from rlcore.loop.loading import JointLoading, Send, WeightLoading
from rlcore.loop.members import ActorPool, Member, Process, Roster
from rlcore.loop.role_protocols import ActorClient, Publication
from rlcore.loop.specs import ScheduleSpec, SupervisionSpec
from rlcore.loop.supervision import Supervisor
from rlcore.loop.timing import Timeline


class Fleet:
    """Members in pools. Holds references and counts, no payloads.

    `assignments` says which member works on which group, `supervisor` which members are healthy.
    """

    def __init__(
        self,
        pools: Sequence[ActorPool],
        schedule: ScheduleSpec,
        supervision: SupervisionSpec,
        *,
        joined: bool,
        tied: str | None = None,
        note: Callable[[str], None],
    ) -> None:
        """Starts the processes of all members and returns at once.

        `joined`: weights are sent to all members at once. `tied`: the setting that ties members to
        GPUs of learner ranks, so that none can be added or removed.
        """
        self._tied = "schedule.colocated=true" if schedule.colocated else tied
        self.joined = joined
        self.colocated = schedule.colocated  # engines sleep while the learner trains
        self._note = note
        self.busy_s: dict[str, float] = {}  # of all training actors by label, at `take_busy_s`
        # (name, counter) -> (pid, its value in that process so far)
        self._counted: dict[tuple[str, str], tuple[int, float]] = {}
        self._roster = Roster(pools)
        self._weights = WeightLoading(self._roster, schedule, supervision)
        self._together = JointLoading(self._roster, schedule.on_publish)
        self.supervisor = Supervisor(
            self._roster,
            supervision,
            joined=joined,
            catch_up=self._catch_up,
            note=note,
            replaces=not schedule.colocated,
        )
        self.assignments = Assignments(self._roster, self.supervisor)
        for pool in self._roster.pools.values():
            for _ in range(pool.count):
                name = self._roster.new_name(pool.label)
                process = Process(pool.spawn(name).client)
                self._roster.add(Member(name, pool, process))

    @property
    def members(self) -> Sequence[Member]:
        """All members, healthy or not."""
        return self._roster.members

    def rotation(self) -> list[Member]:
        """The members that may be given work."""
        return self._roster.rotation()

    def clients(self) -> list[ActorClient]:
        """The present processes."""
        return [m.process.client for m in self.members]

    def place(self, label: str) -> int:
        """The place of a pool, by which evaluation groups name it."""
        return self._roster.pools[label].place

    def sizes(self) -> dict[str, int]:
        """How many members each pool has, healthy or not."""
        return {label: len(self._roster.of(label)) for label in self._roster.pools}

    def training_sizes(self) -> dict[str, int]:
        """How many members each pool of training groups has, healthy or not."""
        pools = self._roster.pools
        return {n: size for n, size in self.sizes().items() if pools[n].purpose != "evaluation"}

    def states(self) -> list[dict[str, str | float]]:
        """Every member as its newest heartbeat shows it, by name."""
        shown = ("running", "waiting", "heartbeat_age_s")
        return [
            {
                "name": m.name,
                "up": float(m.healthy),
                "in_rotation": float(self._roster.in_rotation(m)),
                "version": float(m.process.version),
                "groups": float(len(m.groups)),
                **{key: float(m.process.status[key]) for key in shown if key in m.process.status},
            }
            for m in self.members
        ]

    def keep_precise(self, layers: Mapping[str, int]) -> None:
        """Actors of these labels keep so many decoder layers precise from the next publication
        on."""
        self._weights.precise_layers = dict(layers)

    async def publish(self, publication: Publication, send: Send | None = None) -> dict[str, float]:
        """Have every member load new weights; see `WeightLoading.publish`. `send`:
        `LearnerClient.send`, for group transports. Colocated members are asleep before and awake
        afterwards, the slowest one's seconds of waking among those returned."""
        woken = await self._wake("weights")
        if self.joined:
            assert send is not None
            took = await self._together.publish(publication, self.supervisor.ask, send)
        else:
            took = await self._weights.publish(publication, self.supervisor.ask)
        if not self.colocated:
            return took
        wake_s = woken.get("wake_s", 0.0) + (await self._wake("all")).get("wake_s", 0.0)
        return took | {"wake_s": wake_s}

    async def sleep(self) -> dict[str, float]:
        """Have every member free its memory; the slowest one's seconds and the least GiB freed."""
        return await self._every(lambda client: client.sleep())

    async def _wake(self, what: Wake) -> dict[str, float]:
        if not self.colocated:
            return {}
        return await self._every(lambda client: client.awaken(what))

    async def _every(
        self, call: Callable[[ActorClient], Awaitable[dict[str, float]]]
    ) -> dict[str, float]:
        """Call all members; returns the largest value of each entry of their answers. Raises the
        error of a member that did not answer."""
        asked = [
            self.supervisor.ask(member, member.process, call) for member in self._roster.healthy()
        ]
        answers = await asyncio.gather(*asked)
        self.supervisor.check()
        said = [answer for answer in answers if answer]
        return {name: max(each[name] for each in said) for name in said[0]} if said else {}

    async def _catch_up(self, member: Member) -> bool:
        if self.joined:
            return await self._together.catch_up(member)
        return await self._weights.catch_up(member, self.supervisor.ask)

    def resize(self, counts: Mapping[str, int]) -> None:
        """Give the fleet `counts` members of each label named. The run continues meanwhile.

        New members enter the rotation when they hold the newest weights; groups of removed ones are
        lost and assigned again. Raises UserError for an unknown label or a fleet without members.
        """
        self._check_counts(counts)
        if self._tied is not None and any(len(self._roster.of(n)) != c for n, c in counts.items()):
            raise UserError(
                f"{self._tied} ties every rollout actor to a learner rank's GPU: stop "
                "the run and resume it with other actor.*.count."
            )
        for label, count in counts.items():
            members = self._roster.of(label)
            for member in members[count:]:
                self._roster.remove(member)
                self.supervisor.retire(member)
                self._note(f"{member.name} is removed")
            for _ in range(count - len(members)):
                self._add(self._roster.pools[label])

    def _add(self, pool: ActorPool) -> None:
        name = self._roster.new_name(pool.label)
        self._note(f"{name} is being added")
        self.supervisor.add(name, pool)

    def _check_counts(self, counts: Mapping[str, int]) -> None:
        pools = self._roster.pools
        for label, count in counts.items():
            if label not in pools:
                raise UserError.choice("actor", label, pools, "the run has no such actors")
            if count < 0:
                raise UserError(f"actor.{label}.count={count} is negative: use 0 or more.")
        training = [label for label, pool in pools.items() if pool.purpose != "evaluation"]
        if not sum(counts.get(label, len(self._roster.of(label))) for label in training):
            raise UserError(
                "a run needs at least one rollout actor: leave one of actor.*.count at 1 or more."
            )

    def take_busy_s(self) -> float:
        """Seconds inside engine steps since the last call, by the newest heartbeats: mean over the
        training actors at work, 0 while there is none."""
        at_work = [m for m in self._roster.healthy() if m.pool.purpose != "evaluation"]
        spent = [(m.pool.label, self._since(m, "busy_s")) for m in at_work]
        self.busy_s = {}
        for label, seconds in spent:
            self.busy_s[label] = self.busy_s.get(label, 0.0) + seconds
        return sum(seconds for _, seconds in spent) / len(spent) if spent else 0.0

    def draw(self, timeline: Timeline) -> None:
        """Add how much of the time since the last call each actor spent inside engine steps."""
        for member in self._roster.healthy():
            for start, end, share in member.process.beats.take():
                timeline.add(member.name, "decode", start, end, share)

    def step_costs(self) -> dict[str, float]:
        """Return the cost of engine steps by the newest heartbeats, as metrics: the mean over the
        actors of a label that report it."""
        said: dict[str, list[float]] = {}
        for member in self._roster.healthy():
            for name, seconds in member.process.status.get("costs", {}).items():
                said.setdefault(f"engine/{member.pool.label}/{name}", []).append(seconds)
        return {name: sum(values) / len(values) for name, values in said.items()}

    def accepted(self) -> dict[str, float]:
        """Return the share of proposed tokens that were accepted since the last call, by the newest
        heartbeats, as metrics of each label whose actors were proposed some."""
        said: dict[str, list[float]] = {}
        for member in self._roster.healthy():
            counts = said.setdefault(member.pool.label, [0.0, 0.0])
            for i, name in enumerate(("proposed", "accepted")):
                counts[i] += self._since(member, name)
        return {
            f"engine/{label}/accepted": accepted / proposed
            for label, (proposed, accepted) in said.items()
            if proposed
        }

    def environment_figures(self) -> dict[str, float]:
        """Return metrics of the environments by the newest heartbeats; none without episodes."""
        total: dict[str, float] = {}
        for member in self._roster.healthy():
            for name, value in member.process.status.get("playing", {}).items():
                total[name] = total.get(name, 0.0) + value
        if not total:
            return {}
        return {
            "environment/open": total["open"],
            "environment/waiting": total["waiting"],
            "environment/call_s": total["environment_s"] / max(total["calls"], 1.0),
            "environment/errors": total["errors"],
            "environment/timeouts": total["timeouts"],
            "environment/unreadable_turns": total["unreadable_turns"],
        }

    def _since(self, member: Member, name: str) -> float:
        """The growth of a counter of a member's heartbeat since the last call."""
        status = member.process.status
        if not status:  # no heartbeat of this process yet
            return 0.0
        pid, value = status["pid"], float(status.get(name, 0.0))
        before = self._counted.get((member.name, name), (pid, 0.0))
        self._counted[member.name, name] = (pid, value)
        return value - before[1] if before[0] == pid else value
