"""Admission: the staleness bound, back-pressure by bytes (`cluster.buffer_mib`), and the groups
held for the steps that may use them."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rlcore.buffer.specs import BatchingSpec, Phases
from rlcore.errors import UserError

# The groups that later steps may use, in the order in which they are due.
#
# Admission, arrival and departure of a group cost the same however many groups wait. A batch is
# found by counts, one for every deadline: as many as there are published versions with groups
# waiting.


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting group, as the rules of admission see it."""

    group_id: int
    deadline: int  # last step that may train on it first
    finished: bool
    task: str = ""
    uses_left: int = 1


class Due:
    """Groups of one deadline."""

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self.finished: set[int] = set()
        self._order: list[int] = []  # ascending; those that have left stay until it is made anew
        self._at = 0  # the place in it of the first id that is unfinished
        self._before = 0  # ids before that place that have not left

    def __len__(self) -> int:
        return len(self.ids)

    def put(self, group_id: int, *, finished: bool) -> None:
        """Add or update a group; a finished one stays finished."""
        if group_id not in self.ids:
            self.ids.add(group_id)
            if not self._order or group_id > self._order[-1]:
                self._order.append(group_id)
            else:  # it comes back
                self._order = sorted(self.ids)
                self._at = 0
                self._before = 0
        if finished:
            self.finished.add(group_id)

    def remove(self, group_id: int) -> None:
        """Remove a group that has left."""
        if self._at == len(self._order) or group_id < self._order[self._at]:
            self._before -= 1
        self.ids.remove(group_id)
        self.finished.discard(group_id)

    def leading(self) -> int:
        """Finished groups that come before the first unfinished one, by id."""
        while self._at < len(self._order):
            group_id = self._order[self._at]
            if group_id in self.ids:
                if group_id not in self.finished:
                    break
                self._before += 1
            self._at += 1
        return self._before


class WaitingGroups:
    """All waiting groups. `changes` counts how often the set of groups changed."""

    def __init__(self, groups: Iterable[Candidate] = ()) -> None:
        self.uses_left = 0  # over all of them
        self.finished = 0  # how many of them
        self.finished_of: Counter[str] = Counter()  # the same by task
        self.changes = 0
        self._groups: dict[int, Candidate] = {}
        self._due: dict[int, Due] = {}  # by deadline
        for candidate in groups:
            self.put(candidate)

    def __len__(self) -> int:
        return len(self._groups)

    def candidates(self) -> list[Candidate]:
        """All waiting groups, ascending by id."""
        return [self._groups[i] for i in sorted(self._groups)]

    def get(self, group_id: int) -> Candidate | None:
        """A group, None unless it waits."""
        return self._groups.get(group_id)

    def put(self, candidate: Candidate) -> None:
        """A group, new or changed."""
        before = self._groups.get(candidate.group_id)
        reopened = before is not None and before.finished and not candidate.finished
        if before is not None and (reopened or before.deadline != candidate.deadline):
            self.remove(candidate.group_id)
            before = None
        self._groups[candidate.group_id] = candidate
        self.changes += before is None
        self._count(before, -1)
        self._count(candidate, 1)
        due = self._due.setdefault(candidate.deadline, Due())
        due.put(candidate.group_id, finished=candidate.finished)

    def remove(self, group_id: int) -> None:
        """Remove a group; no error if it does not wait."""
        before = self._groups.pop(group_id, None)
        if before is None:
            return
        self.changes += 1
        self._count(before, -1)
        due = self._due[before.deadline]
        due.remove(group_id)
        if not due:
            del self._due[before.deadline]

    def _count(self, candidate: Candidate | None, sign: int) -> None:
        if candidate is not None:
            self.uses_left += sign * candidate.uses_left
            self.finished += sign * candidate.finished
            self.finished_of[candidate.task] += sign * candidate.finished

    def first(self, count: int, *, strict: bool) -> ReadyGroups | None:
        """The first `count` finished groups by (deadline, id), or None while there are fewer.
        `strict`: the first `count` of all groups, or None while one of them is unfinished."""
        taken: list[tuple[int, int]] = []
        lacking = count
        for deadline, due in self._in_order():
            there = min(lacking, len(due) if strict else len(due.finished))
            if strict and due.leading() < there:
                return None
            taken.append((deadline, there))
            lacking -= there
            if not lacking:
                return ReadyGroups(self, taken)
        return None

    def due(self) -> Iterator[tuple[int, int]]:
        """(deadline, number of its groups), ascending by deadline."""
        return ((deadline, len(due)) for deadline, due in self._in_order())

    def finished_first(self, deadline: int, count: int) -> list[int]:
        """The first finished groups of a deadline, by id."""
        return heapq.nsmallest(count, self._due[deadline].finished)

    def _in_order(self) -> Iterator[tuple[int, Due]]:
        return ((deadline, self._due[deadline]) for deadline in sorted(self._due))


@dataclass(frozen=True, slots=True)
class ReadyGroups:
    """Groups that could be taken together, by deadline."""

    waiting: WaitingGroups
    taken: list[tuple[int, int]]  # (deadline, how many of its first finished groups)

    def ids(self) -> list[int]:
        """Ids of these groups, ascending."""
        of_each = (self.waiting.finished_first(deadline, n) for deadline, n in self.taken)
        return sorted(group_id for ids in of_each for group_id in ids)

    def rest(self) -> Iterator[tuple[int, int]]:
        """(deadline, number of its groups that are not in this choice), ascending by deadline."""
        taken = dict(self.taken)
        return ((deadline, n - taken.get(deadline, 0)) for deadline, n in self.waiting.due())


# The staleness bound: what may be admitted, and which finished groups may be trained on next.
#
# Step v turns learner version v into v + 1 and trains on G groups. Weights are published every H
# steps; eta is `max_staleness`. A phase of M*E steps trains on M batches, on each of them E times
# (`buffer/specs.py: Phases`); H and M*E divide one another. A token's staleness at step v is `v -
# version(token)`, in optimizer steps, whatever the epoch. A group admitted while every actor it may
# be sent to serves version a or a later one has no token older than a, so the bound
#
#     staleness <= cap = max(H, M*E) - 1 + eta        for every token trained on
#
# holds if the group is trained on for the last time at or before a + cap. Its last use comes
# (E-1)*M steps after its first, so that its deadline, the last step that may train on it first, is
#
#     deadline = a + cap - (E-1)*M
#
# With M*E = 1 the cap is H - 1 + eta and the deadline a + cap. Two rules keep every deadline, and
# neither discards a group. They count batches: only the first M steps of a phase take a new one.
# Write W for the groups waiting (in flight or finished, not yet taken), n for the number of the
# next batch, and N(d) for the number of batches whose first step is d or an earlier one.
#
# Admission. At published version a, |W| may grow to (N(a + cap - (E-1)*M) - n) * G: what the
# batches up to the deadline can use. Dropped groups (failed, filtered, evicted) do not count.
#
# Release. A set S of G finished groups may be taken as batch n only if the rest can still be met,
# that is if for every d at most max(0, N(d) - n - 1) * G groups of W \ S have a deadline <= d.
# Sorted by deadline, the i-th of the rest (i = 0, 1, ...) would be in batch n + 1 + i // G at the
# latest, whose first step must not exceed its deadline.
#
# Why it holds. Invariant I(n): for every d, at most max(0, N(d) - n) * G groups of W have a
# deadline <= d. Admission keeps it: a new group is only counted for d >= its deadline, and there
# |W| <= (N(deadline) - n) * G is at least as strict as I, whatever the order in which published
# versions were seen. Release turns I(n) into I(n + 1) by its own condition. Dropping only lowers
# counts. So a group taken as batch n has a deadline that is not before the batch's first step,
# always.
#
# Why it never stalls. A phase that begins at step s needs all of its M batches first. Once the
# publishes up to s have arrived, a >= s - max(0, H - M*E), because H and M*E divide one another, so
# that the first steps of these batches, up to s + M - 1, are not after a + cap - (E-1)*M: there is
# room for all of them. If G groups wait and all are finished, the G earliest deadlines satisfy the
# release condition by I(n), since every count falls by G or to zero. In between, only stragglers
# whose deadline is at stake are waited for. Taking the earliest deadlines lowers every count at
# once, so if they may not be released no other choice may.
#
# With eta = 0 the order of training must not depend on timing: groups are then taken strictly by id
# (`strict`), which also satisfies the release condition. Which ids survive filtering does not
# depend on timing either, as a new group is admitted only when an earlier one was dropped.


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """G groups per step, H steps per publish, eta = max_staleness (optimizer steps), the phases."""

    groups_per_step: int
    steps_per_publish: int
    max_staleness: int
    phases: Phases

    @classmethod
    def of(cls, spec: BatchingSpec) -> StalenessBound:
        """The bound that a schedule sets."""
        return cls(spec.groups_per_step, spec.publish_period, spec.max_staleness, spec.phases)

    @property
    def cap(self) -> int:
        """The largest staleness a token may have when trained on, in optimizer steps."""
        return max(self.steps_per_publish, self.phases.steps) - 1 + self.max_staleness

    @property
    def behind(self) -> int:
        """The largest staleness of a token as the phase begins that trains on it."""
        return self.cap - (self.phases.steps - 1)

    @property
    def synchronous(self) -> bool:
        return self.max_staleness == 0

    @property
    def groups_per_phase(self) -> int:
        """Groups that a phase needs before its first step."""
        return self.phases.batches * self.groups_per_step

    def deadline(self, admitted_version: int) -> int:
        """The last step that may train first on a group admitted at this published version.

        With eta = 0 a version counts as the publish before it. A run that is resumed between two
        publishes serves a newer one, and must not draw earlier than one that was not stopped.
        """
        if self.synchronous:
            admitted_version -= admitted_version % self.steps_per_publish
        return admitted_version + self.cap - self.phases.repeats

    def capacity(self, published: int, step: int) -> int:
        """Groups that may wait when `step` is the next to take a new batch: those that batches up
        to the deadline can use."""
        usable = self.phases.batches_before(self.deadline(published) + 1)
        return max(0, usable - self.phases.batches_before(step)) * self.groups_per_step

    def feasible(self, rest: Iterable[tuple[int, int]], step: int) -> bool:
        """Return whether the batches after `step`'s can take all groups. `rest`: (deadline,
        number of groups with it), ascending."""
        following, before = self.phases.batches_before(step) + 1, 0
        for deadline, count in rest:
            before += count
            # the last of them comes latest
            last = following + (before - 1) // self.groups_per_step
            if count and self.phases.first_use(last) > deadline:
                return False
        return True

    def release(self, waiting: WaitingGroups, step: int, *, strict: bool) -> list[int] | None:
        """Ids of the batch for `step`, ascending, or None if it must wait. `strict`: by id alone,
        finished or not."""
        batch = waiting.first(self.groups_per_step, strict=strict)
        if batch is None or not self.feasible(batch.rest(), step):
            return None
        return batch.ids()

    def excess(self, waiting: Sequence[Candidate], step: int) -> list[int]:
        """Ids that cannot be trained on in time from `step` on. Empty unless a resume changed G, H,
        M or eta."""
        kept, lost, batch = 0, [], self.phases.batches_before(step)
        for c in sorted(waiting, key=lambda c: (c.deadline, not c.finished, c.group_id)):
            if self.phases.first_use(batch + kept // self.groups_per_step) <= c.deadline:
                kept += 1
            else:
                lost.append(c.group_id)
        return lost


KEY = "cluster.buffer_mib"
MIB = 2**20


def check_capacity(
    max_bytes: int, batching: BatchingSpec, *, samples_per_group: int, longest: int
) -> None:
    """Refuse a limit below the size of one update phase's groups at full length: p_ref is computed
    for all of them before the first step. With a fixed lag, the groups of that many further steps
    count, too.

    longest: bytes of a sample at full length. A smaller limit would work only as long as responses
    are short, and then end the run."""
    groups = batching.groups_per_step
    batches = batching.phases.batches + (batching.lag or 0)
    needed = batches * groups * samples_per_group * longest
    if needed > max_bytes:
        holds = f"{batches} batches" if batches > 1 else "one step"
        raise UserError(
            f"{KEY}={max_bytes / MIB:g} is too small: {holds} of schedule.groups_per_step="
            f"{groups} x rollout.samples_per_prompt={samples_per_group} samples of up to "
            f"{longest / MIB:.3g} MiB each; use {-(-needed // MIB)} or more, or a smaller "
            "rollout.max_new_tokens or rollout.logprobs_k."
        )


# Back-pressure. A group in flight will take bytes that nobody has seen yet. It is expected to take
# as much as groups had on average when they were whole, or, before the first one is, as much as
# its samples can take by their limits on tokens, and at least a mebibyte each, since an engine of a
# user's own may add to records. So much is reserved for it, whatever of it has arrived.
#
# What a phase lacks is admitted without regard to the reserve while no commit can free bytes, since
# the run would stop otherwise: then nothing but this phase's groups is there, which fit at full
# length (`check_capacity`).
#
# Why the limit holds. If all groups take S bytes and samples keep to their limits: without that
# exception, groups are admitted while bytes + reserve <= limit, which arrivals only lower, and with
# it, phase * S <= limit. If sizes differ, groups in flight may exceed the limit by what they are
# larger than the mean.


@dataclass(frozen=True, slots=True)
class ByteLimit:
    """total: bytes of records above which nothing is admitted. sample: bytes that a sample is
    expected to take before the first group has arrived whole."""

    total: int
    sample: int = MIB

    def fitting(self, used: int, *, in_flight: int, group_bytes: float) -> int:
        """How many groups fit next to `used` bytes of records and the groups in flight, of which
        each takes `group_bytes`. Negative if too many are in flight."""
        return int((self.total - used) // group_bytes) - in_flight
