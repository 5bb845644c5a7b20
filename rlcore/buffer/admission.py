"""The staleness bound: what may be admitted, and which finished groups may be trained on next.

Step v turns learner version v into v + 1 and trains on G groups. Weights are published every H
steps; eta is `max_staleness`. A token's staleness at step v is `v - version(token)`. A group
admitted while every actor it may be sent to serves version a or a later one has no token older than
a, so the bound

    staleness <= cap = H - 1 + eta          for every token trained on

holds if the group is trained on at or before its deadline a + cap. Two rules keep every deadline,
and neither throws anything away. Write W for the groups waiting (in flight or finished, not yet
taken) and v for the next step to take.

Admission. At published version a, |W| may grow to (a + H + eta - v) * G. In absolute numbers, as
each step takes G: consumed + waiting <= (a + H + eta) * G, where dropped groups (failed, filtered,
evicted) do not count.

Release. A batch S of G finished groups may be taken for step v only if the rest can still be met,
that is if for every d >= v at most (d - v) * G groups of W \\ S have a deadline <= d. Sorted by
deadline, the i-th of the rest (i = 0, 1, ...) would be trained on at step v + 1 + i // G at the
latest, which must not exceed its deadline.

Why it holds. Invariant I(v): for every d, at most max(0, d - v + 1) * G groups of W have a deadline
<= d. Admission keeps it: a new group is only counted for d >= a + cap, and there |W| <= (a + cap +
1 - v) * G is at least as strict as I, whatever the order in which published versions were seen.
Release turns I(v) into I(v + 1) by its own condition. Dropping only lowers counts. So a group taken
at v has a deadline >= v, always.

Why it never stalls. If fewer than G groups wait and v <= a + cap, admission has room for more. If G
wait and all are finished, the G earliest deadlines satisfy the release condition by I(v), since
every count falls by G or to zero. In between, only stragglers whose deadline is at stake are waited
for. v > a + cap happens only while a publish is pending. Among finished groups the earliest
deadlines lower every count at once, so if they may not be released no other choice may.

With eta = 0 the order of training must not depend on timing: groups are then taken strictly by id
(`strict`), which also satisfies the release condition. Which ids survive filtering does not depend
on timing either, as a new group is admitted only when an earlier one was dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the rules know of a waiting group."""

    group_id: int
    deadline: int  # last step that may train on it
    finished: bool
    task: str = ""
    uses_left: int = 1


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """G groups per step, H steps per publish, eta = max_staleness (optimizer steps)."""

    groups_per_step: int
    steps_per_publish: int
    max_staleness: int

    @property
    def cap(self) -> int:
        """The largest staleness a token may have when trained on, in optimizer steps."""
        return self.steps_per_publish - 1 + self.max_staleness

    @property
    def synchronous(self) -> bool:
        return self.max_staleness == 0

    def deadline(self, admitted_version: int) -> int:
        """The last step that may train on a group admitted at this published version."""
        return admitted_version + self.cap

    def capacity(self, published: int, step: int) -> int:
        """Groups that may wait when `step` is the next to take: those that steps up to the deadline
        can use."""
        return max(0, published + self.cap + 1 - step) * self.groups_per_step

    def feasible(self, rest: Iterable[int], step: int) -> bool:
        """Whether groups with these deadlines can all be trained on in steps `step + 1`, `step +
        2`, ..."""
        return all(
            step + 1 + i // self.groups_per_step <= deadline
            for i, deadline in enumerate(sorted(rest))
        )

    def release(self, waiting: Sequence[Candidate], step: int, *, strict: bool) -> list[int] | None:
        """Ids of the batch for `step`, ascending, or None if it must wait. `strict`: by id alone,
        finished or not."""
        order = sorted(waiting, key=lambda c: (c.deadline, c.group_id))
        batch = [c for c in order if strict or c.finished][: self.groups_per_step]
        if len(batch) < self.groups_per_step or not all(c.finished for c in batch):
            return None
        chosen = {c.group_id for c in batch}
        if not self.feasible((c.deadline for c in order if c.group_id not in chosen), step):
            return None
        return sorted(chosen)

    def excess(self, waiting: Sequence[Candidate], step: int) -> list[int]:
        """Ids that cannot be trained on in time from `step` on. Empty unless a resume changed G, H
        or eta."""
        kept, lost = 0, []
        for c in sorted(waiting, key=lambda c: (c.deadline, not c.finished, c.group_id)):
            if step + kept // self.groups_per_step <= c.deadline:
                kept += 1
            else:
                lost.append(c.group_id)
        return lost
