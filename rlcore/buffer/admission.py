"""The staleness bound: what may be admitted, and which finished groups may be trained on next.

Step v turns learner version v into v + 1 and trains on G groups. Weights are published every H
steps; eta is `max_staleness`. A phase of M*E steps trains on M batches, on each of them E times
(`buffer/specs.py: Phases`); H and M*E divide one another. A token's staleness at step v is
`v - version(token)`, in optimizer steps, whatever the epoch. A group admitted while every actor it
may be sent to serves version a or a later one has no token older than a, so the bound

    staleness <= cap = max(H, M*E) - 1 + eta        for every token trained on

holds if the group is trained on for the last time at or before a + cap. Its last use comes (E-1)*M
steps after its first, so that its deadline, the last step that may train on it first, is

    deadline = a + cap - (E-1)*M

With M*E = 1 the cap is H - 1 + eta and the deadline a + cap. Two rules keep every deadline, and
neither throws anything away. They count batches: only the first M steps of a phase take a new one.
Write W for the groups waiting (in flight or finished, not yet taken), n for the number of the next
batch, and N(d) for the number of batches whose first step is d or an earlier one.

Admission. At published version a, |W| may grow to (N(a + cap - (E-1)*M) - n) * G: what the batches
up to the deadline can use. Dropped groups (failed, filtered, evicted) do not count.

Release. A set S of G finished groups may be taken as batch n only if the rest can still be met,
that is if for every d at most max(0, N(d) - n - 1) * G groups of W \\ S have a deadline <= d.
Sorted by deadline, the i-th of the rest (i = 0, 1, ...) would be in batch n + 1 + i // G at the
latest, whose first step must not exceed its deadline.

Why it holds. Invariant I(n): for every d, at most max(0, N(d) - n) * G groups of W have a deadline
<= d. Admission keeps it: a new group is only counted for d >= its deadline, and there |W| <=
(N(deadline) - n) * G is at least as strict as I, whatever the order in which published versions
were seen. Release turns I(n) into I(n + 1) by its own condition. Dropping only lowers counts. So a
group taken as batch n has a deadline that is not before the batch's first step, always.

Why it never stalls. A phase that begins at step s needs all of its M batches first. Once the
publishes up to s have arrived, a >= s - max(0, H - M*E), because H and M*E divide one another, so
that the first steps of these batches, up to s + M - 1, are not after a + cap - (E-1)*M: there is
room for all of them. If G groups wait and all are finished, the G earliest deadlines satisfy the
release condition by I(n), since every count falls by G or to zero. In between, only stragglers
whose deadline is at stake are waited for. Among finished groups the earliest deadlines lower every
count at once, so if they may not be released no other choice may.

With eta = 0 the order of training must not depend on timing: groups are then taken strictly by id
(`strict`), which also satisfies the release condition. Which ids survive filtering does not depend
on timing either, as a new group is admitted only when an earlier one was dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlcore.buffer.specs import BatchingSpec, Phases
from rlcore.buffer.waiting import Candidate, Waiting


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
    def synchronous(self) -> bool:
        return self.max_staleness == 0

    @property
    def groups_per_phase(self) -> int:
        """Groups that a phase needs before its first step."""
        return self.phases.batches * self.groups_per_step

    def deadline(self, admitted_version: int) -> int:
        """The last step that may train first on a group admitted at this published version.

        With eta = 0 a version counts as the publish before it: a run that is resumed between two
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
        """Whether groups can all be taken by the batches after that of `step`. `rest`: (deadline,
        how many have it), ascending."""
        following, before = self.phases.batches_before(step) + 1, 0
        for deadline, count in rest:
            before += count
            # the last of them comes latest
            last = following + (before - 1) // self.groups_per_step
            if count and self.phases.first_use(last) > deadline:
                return False
        return True

    def release(self, waiting: Waiting, step: int, *, strict: bool) -> list[int] | None:
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
