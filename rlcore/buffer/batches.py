"""The choice of the groups of each step, from the capacity for new groups to the commit of a batch.

A step is consumed in two parts: `take(step)` fixes its batch, `commit(step)` says that it was
trained on. Until then the batch is kept, and `rollback(step)` puts it back, to be taken again as
the same batch. Where a phase has several epochs, a batch's first `take` pins it to the later steps
of the phase that use it again. Its groups leave at the commit of the last one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rlcore.buffer.admission import (
    KEY,
    MIB,
    ByteLimit,
    Candidate,
    StalenessBound,
    WaitingGroups,
)
from rlcore.buffer.ledger import LedgerError
from rlcore.buffer.live import LiveGroup, LiveGroups
from rlcore.buffer.specs import BatchingSpec, TaskShare
from rlcore.errors import UserError
from rlcore.seeding import derive_seed

# A task without a weight is used only when no other task has groups waiting.
UNNAMED_WEIGHT = 1e-9


# Which groups a step trains on: FIFO by deadline, uniform with replay, or by task. Whole groups
# only.
#
# Uniform and by_task may leave a group unused until its deadline; there `max_staleness` is a hard
# cap, and such groups are evicted with reason "stale". With eta = 0 they draw only from the
# complete pool of a publish (nothing in flight, no room for more), so that the draw depends on the
# seed alone. If `cluster.buffer_mib` limits admission, the pool depends on record sizes.


class Sampler:
    """Draws batches of G groups. `drawn` (groups per task so far) is its only state and part of a
    checkpoint.

    tasks: shares by task, the part of prompt_id before the first "/"; None: equal; a task that is
    not named, or has the weight 0, comes last. Raises ValueError for a negative weight.
    """

    def __init__(
        self,
        bound: StalenessBound,
        batching: BatchingSpec,
        run_seed: int,
        tasks: Mapping[str, TaskShare] | None,
    ) -> None:
        weights = None if tasks is None else {name: t.weight for name, t in tasks.items()}
        if weights is not None and any(w < 0 for w in weights.values()):
            raise ValueError(f"weights of tasks must not be negative: {weights}")
        self._bound = bound
        self._order = batching.sampling
        # the order of training must not depend on timing
        self._strict = bound.synchronous or batching.lag is not None
        self._run_seed = run_seed
        self.weights = weights
        self.drawn: Counter[str] = Counter()
        # (what waited, which task had no finished group, how many it had): until one of these
        # changes, there is no batch
        self._lacked: tuple[int, str, int] | None = None

    @property
    def hard_cap(self) -> bool:
        """True if groups may pass their deadline unused and must then be evicted."""
        return self._order != "fifo"

    def draw(self, waiting: WaitingGroups, step: int, *, pool_complete: bool) -> list[int] | None:
        """Ids for `step`, ascending, or None. `pool_complete`: nothing in flight and no place for
        more groups."""
        if self._order == "fifo":
            return self._bound.release(waiting, step, strict=self._strict)
        if self._bound.synchronous and not pool_complete:
            return None
        if waiting.finished < self._bound.groups_per_step:
            return None
        if self._order == "by_task":
            return self._by_task(waiting)
        pool = [c for c in waiting.candidates() if c.finished]
        generator = np.random.default_rng(derive_seed(self._run_seed, "buffer_draw", step))
        picked = generator.choice(len(pool), self._bound.groups_per_step, replace=False)
        return sorted(pool[i].group_id for i in picked.tolist())

    def confirm(self, tasks: Sequence[str], sign: int = 1) -> None:
        """Count a taken batch towards the shares of its tasks; sign -1 takes it back."""
        self._lacked = None
        for task in tasks:
            self.drawn[task] += sign

    def restore(self, drawn: Mapping[str, int], weights: Mapping[str, float] | None) -> None:
        """Continue from a checkpoint. Where the `weights` have changed, shares are counted from 0:
        else a task would first make up for steps in which it was due less."""
        self._lacked = None
        self.drawn = Counter(drawn if weights == self.weights else {})

    def _by_task(self, waiting: WaitingGroups) -> list[int] | None:
        """Every place of the batch goes to the task furthest behind its share; a task without
        waiting groups is skipped."""
        if self._lacked is not None:
            changes, task, finished = self._lacked
            if (waiting.changes, waiting.finished_of[task]) == (changes, finished):
                return None
        left: Counter[str] = Counter()
        queues: dict[str, deque[int]] = {}
        for c in sorted(waiting.candidates(), key=lambda c: (c.deadline, c.group_id)):
            left[c.task] += 1
            if c.finished:
                queues.setdefault(c.task, deque()).append(c.group_id)
        drawn = Counter(self.drawn)
        batch: list[int] = []
        while len(batch) < self._bound.groups_per_step:
            tasks = [t for t, count in left.items() if count]
            if not tasks:
                return None
            task = min(tasks, key=lambda t: ((drawn[t] + 1) / self._weight(t), t))
            if not queues.get(task):  # its groups are in flight
                self._lacked = waiting.changes, task, waiting.finished_of[task]
                return None
            batch.append(queues[task].popleft())
            left[task] -= 1
            drawn[task] += 1
        return sorted(batch)

    def _weight(self, task: str) -> float:
        return 1.0 if self.weights is None else self.weights.get(task) or UNNAMED_WEIGHT


class Batches:
    """The order of training over the live groups. Steps are taken in order, `next_step` is next."""

    def __init__(
        self,
        live: LiveGroups,
        batching: BatchingSpec,
        *,
        limit: ByteLimit,
        run_seed: int,
        tasks: Mapping[str, TaskShare] | None,
    ) -> None:
        self._live = live
        self._limit = limit
        self._max_uses = batching.max_uses
        self.bound = StalenessBound.of(batching)
        self._admitting = self.bound
        self.sampler = Sampler(self.bound, batching, run_seed, tasks)
        self.next_step = 0
        self.taken: dict[int, list[int]] = {}  # uncommitted step -> ids
        # rolled back step, or one of a later epoch -> ids it must get
        self.pinned: dict[int, list[int]] = {}
        # what waits, as it was found at a horizon and has been followed since; None: to be found
        self._found: WaitingGroups | None = None
        self._found_at = 0
        self._touched: list[int] = []  # ids of which something has changed since
        self._pinned_ids: set[int] | None = None  # of all in `pinned`; None: to be collected

    def limit(self, staleness: int) -> None:
        """Admit as a schedule of this `max_staleness` does, at least 1 and at most the configured
        one. Admitted groups keep their deadlines; the bound of a synchronous schedule does not
        move."""
        if not self.bound.synchronous:
            least = min(max(staleness, 1), self.bound.max_staleness)
            self._admitting = replace(self.bound, max_staleness=least)

    def room(self) -> int:
        """Groups that may be admitted now; 0 while the records exceed the limit. Raises UserError
        if the records of less than one phase's groups exceed it.
        """
        live, waiting = self._live, self.waiting()
        room = self.admissible()
        # groups of the phase that takes the next new batch, less those taken
        phases, step = self.bound.phases, self._horizon
        batches = phases.batches_before(phases.end(step)) - phases.batches_before(step)
        missing = max(0, batches * self.bound.groups_per_step - len(waiting))
        needed = missing if self._stuck() else 0
        if live.bytes < self._limit.total:
            expected = live.mean_bytes() or self._limit.sample * live.most_samples
            in_flight = len(waiting) - waiting.finished
            fit = self._limit.fitting(live.bytes, in_flight=in_flight, group_bytes=expected)
            return max(0, min(room, max(needed, fit)))
        if needed:
            raise UserError(
                f"{KEY}={self._limit.total / MIB:g} is too small: {len(live.entries)} groups fill "
                f"it, and an update phase needs {self.bound.groups_per_phase} at once "
                "(schedule.groups_per_step for each of its batches); raise it."
            )
        return 0

    def admissible(self) -> int:
        """Groups that the bound lets in now, whatever the records' bytes."""
        waiting = self.waiting()
        capacity = self._admitting.capacity(self._live.published, self._horizon)
        room = max(0, capacity - waiting.uses_left) // self._max_uses
        if capacity:  # a batch needs G different groups, however often each may be used
            room = max(room, self.bound.groups_per_step - len(waiting))
        return room

    def choose(self, step: int) -> list[int] | None:
        """Ids of the batch of `step`, ascending, or None if it must wait.

        Raises ValueError for another step than the next one.
        """
        if step != self.next_step:
            raise ValueError(
                f"buffer: step {step} is out of order, the next one to take is {self.next_step}"
            )
        if step in self.pinned:
            ids = self.pinned[step]
            return ids if self._live.redrawn.isdisjoint(ids) else None
        waiting = self.waiting()
        if waiting.finished < self.bound.groups_per_step:
            return None
        needs_pool = self.sampler.hard_cap and self.bound.synchronous
        all_finished = waiting.finished == len(waiting)
        complete = needs_pool and all_finished and self.room() == 0
        return self.sampler.draw(waiting, step, pool_complete=complete)

    def take(self, step: int) -> list[LiveGroup] | None:
        """The groups of the batch of `step`, ascending by id, or None if it must wait."""
        ids = self.choose(step)
        if ids is None:
            return None
        self._touch(ids)
        entries = [self._live.entries[i] for i in ids]
        self.pinned.pop(step, None)
        self.taken[step] = ids
        self.next_step = step + 1
        for later in self.bound.phases.again(step):
            self.pinned.setdefault(later, ids)
        for entry in entries:
            entry.taken_by.append(step)
        self.sampler.confirm([e.task for e in entries])
        return entries

    def commit(self, step: int) -> None:
        """The batch of `step` was trained on: groups that no later step will use leave."""
        if step not in self.taken:
            raise ValueError(f"buffer: the batch of step {step} was not taken, or is committed")
        ids, pinned = self.taken.pop(step), self._all_pinned()
        self._touch(ids)
        for group_id in ids:
            entry = self._live.entries[group_id]
            entry.taken_by.remove(step)
            entry.uses += 1
            entry.last_step = max(entry.last_step, step)
            used_up = entry.uses >= self._max_uses or self._expired(entry)
            if used_up and not entry.taken_by and group_id not in pinned:
                self._live.consume(entry)

    def rollback(self, step: int) -> None:
        """Put back the uncommitted batches of `step` and later, to be taken again as they were."""
        self.forget()
        for later in sorted((s for s in self.taken if s >= step), reverse=True):
            ids = self.taken.pop(later)
            self.pinned[later] = ids
            for group_id in ids:
                self._live.entries[group_id].taken_by.remove(later)
            self.sampler.confirm([self._live.entries[i].task for i in ids], sign=-1)
            self.next_step = later

    def give_up(self, reason: str) -> int:
        """Evict all live groups, also in batches that were taken and are not committed: the
        next batch is of groups that are admitted from now on. Returns their number."""
        if self.taken:
            self.rollback(min(self.taken))
        self.pinned = {}
        self.forget()
        before = self._live.ledger.evicted[reason]
        for entry in list(self._live.entries.values()):
            if entry.uses:
                self._live.consume(entry)
            else:
                self._live.evict(entry, reason)
        return self._live.ledger.evicted[reason] - before

    def resume(self) -> None:
        """After a restore: put back what was not committed. Evict groups that can no longer be
        trained on in time, also out of batches that were chosen by another bound."""
        self.forget()
        if self.taken:
            self.rollback(min(self.taken))
        pinned = self._all_pinned()
        for entry in self._live.entries.values():
            if not entry.finished and (entry.uses or entry.group_id in pinned):
                self._live.fix(entry)
        size = self.bound.groups_per_step  # batches of another size are chosen anew
        self.pinned = {
            step: ids
            for step, ids in self.pinned.items()
            if len(ids) == size and self._in_time(ids, self.bound.phases.first(step))
        }
        self.forget()
        for group_id in self.bound.excess(self.waiting().candidates(), self._horizon):
            self._live.evict_stale(self._live.entries[group_id])

    def _in_time(self, ids: Sequence[int], first: int) -> bool:
        """Return whether these groups may be trained on for the first time at `first`, or have been
        already."""
        admitted = (self._live.entries[i].admitted_version for i in ids)
        return first < self.next_step or all(first <= self.bound.deadline(a) for a in admitted)

    def expire(self) -> None:
        """The hard cap of samplers that may pass a group over: evict groups past their deadline."""
        if not self.sampler.hard_cap:
            return
        pinned, horizon = self._all_pinned(), self._horizon
        admitted = self._live.admitted_at
        for version in [v for v in admitted if self.bound.deadline(v) < horizon]:
            for entry in [self._live.entries[i] for i in admitted[version]]:
                if not entry.taken_by and entry.group_id not in pinned:
                    self._live.evict_stale(entry)

    def waiting(self) -> WaitingGroups:
        """Live groups that a later step may use, except those that a rolled back step will get
        again."""
        horizon, touched = self._horizon, {*self._live.take_touched(), *self._touched}
        self._touched.clear()
        if self._found is None:
            self._found = WaitingGroups(self._look())
        else:
            if horizon != self._found_at:  # whether a taken group leaves at its commit
                touched.update(i for ids in self.taken.values() for i in ids)
            for group_id in sorted(touched):
                self._follow(self._found, group_id)
        self._found_at = horizon
        return self._found

    def promised(self) -> set[int]:
        """Ids of the groups that some batch has."""
        return {i for ids in self.taken.values() for i in ids} | self._all_pinned()

    def forget(self) -> None:
        """Drop the cached list of waiting groups; the next call builds it anew."""
        self._found = self._pinned_ids = None

    def _touch(self, group_ids: Sequence[int]) -> None:
        """Note that batches with these groups were taken, pinned or committed."""
        self._touched += group_ids
        self._pinned_ids = None

    def _follow(self, waiting: WaitingGroups, group_id: int) -> None:
        entry = self._live.entries.get(group_id)
        candidate = None if entry is None else self._candidate(entry)
        if candidate is None:
            waiting.remove(group_id)
        else:
            waiting.put(candidate)

    def _look(self) -> list[Candidate]:
        found = (self._candidate(e) for e in self._live.entries.values())
        return [candidate for candidate in found if candidate is not None]

    def _candidate(self, entry: LiveGroup) -> Candidate | None:
        """Return a group as the rules of admission see it, or None if no later step may use it."""
        uses_left = self._max_uses - entry.uses - len(entry.taken_by)
        leaves_at_commit = entry.taken_by and self._expired(entry)
        if uses_left <= 0 or entry.group_id in self._all_pinned() or leaves_at_commit:
            return None
        deadline = self.bound.deadline(entry.admitted_version)
        return Candidate(entry.group_id, deadline, entry.finished, entry.task, uses_left)

    def check(self) -> None:
        """Raise LedgerError unless uncommitted batches and live groups agree."""
        entries = self._live.entries
        for step, ids in self.taken.items():
            if any(i not in entries or step not in entries[i].taken_by for i in ids):
                raise LedgerError("buffer: uncommitted batches and live groups disagree")

    def check_group(self, entry: LiveGroup) -> None:
        """Raise LedgerError unless a group is in its known batches, and waits if it should."""
        if any(entry.group_id not in self.taken.get(step, ()) for step in entry.taken_by):
            raise LedgerError("buffer: uncommitted batches and live groups disagree")
        if self.waiting().get(entry.group_id) != self._candidate(entry):
            raise LedgerError("buffer: the waiting groups are not the ones that were counted")

    @property
    def _horizon(self) -> int:
        """The first step whose batch is not fixed yet: pinned steps will get theirs."""
        step = self.next_step
        while step in self.pinned:
            step += 1
        return step

    def _stuck(self) -> bool:
        """Return whether no commit will free bytes until the phase that takes the next new batch
        has all of its batches."""
        start = self.bound.phases.start(self._horizon)
        return all(step >= start for step in (*self.taken, *self.pinned))

    def _all_pinned(self) -> set[int]:
        if self._pinned_ids is None:
            self._pinned_ids = {i for ids in self.pinned.values() for i in ids}
        return self._pinned_ids

    def _expired(self, entry: LiveGroup) -> bool:
        return self.bound.deadline(entry.admitted_version) < self._horizon
