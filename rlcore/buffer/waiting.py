"""The groups that later steps may use, in the order in which they are due.

Admission, arrival and departure of a group cost the same whatever waits. A batch is looked for by
counts, of which there is one for every deadline: as many as published versions have groups waiting.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the rules know of a waiting group."""

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
        """A group, new or changed; one that is finished stays so."""
        if group_id not in self.ids:
            self.ids.add(group_id)
            if not self._order or group_id > self._order[-1]:
                self._order.append(group_id)
            else:  # it comes back
                self._reorder()
        if finished:
            self.finished.add(group_id)

    def _reorder(self) -> None:
        self._order = sorted(self.ids)
        self._at = 0
        self._before = 0

    def remove(self, group_id: int) -> None:
        """A group that has left."""
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


class Waiting:
    """All of them. `changes` counts how often it became another set of groups."""

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
        """All of them, ascending by id."""
        return [self._groups[i] for i in sorted(self._groups)]

    def get(self, group_id: int) -> Candidate | None:
        """A group, if it waits."""
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
        """Forget a group; it may be one that does not wait."""
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

    def first(self, count: int, *, strict: bool) -> Batch | None:
        """The first `count` finished groups by (deadline, id), or None while there are fewer.
        `strict`: the first of all, or None while one of these is unfinished."""
        taken: list[tuple[int, int]] = []
        lacking = count
        for deadline, due in self._in_order():
            there = min(lacking, len(due) if strict else len(due.finished))
            if strict and due.leading() < there:
                return None
            taken.append((deadline, there))
            lacking -= there
            if not lacking:
                return Batch(self, taken)
        return None

    def due(self) -> Iterator[tuple[int, int]]:
        """(deadline, groups of it), ascending."""
        return ((deadline, len(due)) for deadline, due in self._in_order())

    def finished_first(self, deadline: int, count: int) -> list[int]:
        """The first finished groups of a deadline, by id."""
        return heapq.nsmallest(count, self._due[deadline].finished)

    def _in_order(self) -> Iterator[tuple[int, Due]]:
        return ((deadline, self._due[deadline]) for deadline in sorted(self._due))


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups that could be taken together, by deadline."""

    waiting: Waiting
    taken: list[tuple[int, int]]  # (deadline, how many of its first finished groups)

    def ids(self) -> list[int]:
        """Their ids, ascending."""
        of_each = (self.waiting.finished_first(deadline, n) for deadline, n in self.taken)
        return sorted(group_id for ids in of_each for group_id in ids)

    def rest(self) -> Iterator[tuple[int, int]]:
        """(deadline, groups of it that are not among them), ascending."""
        taken = dict(self.taken)
        return ((deadline, n - taken.get(deadline, 0)) for deadline, n in self.waiting.due())
