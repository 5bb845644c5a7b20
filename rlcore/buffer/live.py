"""The groups that were admitted and have not departed, with their accounts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from rlcore.buffer.accounts import TaskAccounts
from rlcore.buffer.entry import Entry
from rlcore.buffer.ledger import Ledger, LedgerError
from rlcore.buffer.specs import TaskShare
from rlcore.references import Record, RecordReference

STALE = "stale"


class LiveGroups:
    """Live groups by id, the ledger, the bytes they hold, and the versions that their age is
    measured against.

    `published`: the version that every actor serves. `learner`: optimizer steps done.
    """

    def __init__(
        self, samples_per_group: int, tasks: Mapping[str, TaskShare] | None = None
    ) -> None:
        """`tasks`: whose groups have a size of their own, by the first part of a prompt id."""
        self._samples_per_group = samples_per_group
        self._tasks = dict(tasks or {})
        self.ledger = Ledger()
        self.accounts = TaskAccounts()
        self.entries: dict[int, Entry] = {}
        self.bytes = 0
        self.completed_bytes = (0, 0)  # groups completed so far, the bytes they kept
        self.published = 0
        self.learner = 0
        # id -> nothing, by the version of their admission
        self.admitted_at: dict[int, dict[int, None]] = {}
        self._touched: list[int] = []  # ids that came, finished or left since `take_touched`
        self.waited_for = 0  # groups in flight
        self._landed: list[int] = []  # ids that ceased to be in flight since `take_landed`
        self.resampled = 0  # groups that were sampled again, since a shard was lost
        self.redrawn: set[int] = set()  # of these in flight, that a batch has
        self._released: dict[str, list[int]] = defaultdict(list)  # by shard, until they are asked
        self._lost_shards: set[str] = set()
        self._unaudited: list[int] = []  # of a round over all live groups

    def samples(self, entry: Entry) -> int:
        """Samples that a group has when it is complete."""
        share = self._tasks.get(entry.task) if self._tasks else None
        return self._samples_per_group if share is None else share.samples

    def remembers(self, entry: Entry) -> bool:
        """Whether the pass rate of a group is wanted."""
        share = self._tasks.get(entry.task)
        return share is not None and share.remember

    @property
    def tasks(self) -> tuple[str, ...]:
        """Labels of several training tasks; empty in a run with one."""
        return tuple(self._tasks)

    @property
    def most_samples(self) -> int:
        """Of the largest groups."""
        return max([self._samples_per_group, *(t.samples for t in self._tasks.values())])

    def admit(self, prompt_id: str) -> int:
        """Open one group at the published version; its id."""
        group_id = self.ledger.admit()
        self.entries[group_id] = Entry(group_id, prompt_id, self.published)
        self.admitted_at.setdefault(self.published, {})[group_id] = None
        self._touched.append(group_id)
        self.waited_for += 1
        return group_id

    def unfinished(self) -> bool:
        """Whether any group is in flight."""
        return self.waited_for > 0

    def restore(self, entries: Iterable[Entry]) -> None:
        """Continue with these groups, ascending by id."""
        self.entries = {e.group_id: e for e in entries}
        self.admitted_at = {}
        for e in self.entries.values():
            self.admitted_at.setdefault(e.admitted_version, {})[e.group_id] = None
            e.held = e.size
        self.bytes = sum(e.held for e in self.entries.values())
        self.waited_for = sum(not e.finished for e in self.entries.values())

    def resize(self, entry: Entry) -> None:
        """Account for what a group holds now."""
        size = entry.size
        self.bytes += size - entry.held
        entry.held = size

    def take_touched(self) -> list[int]:
        """Ids of the groups that came, finished or left since the last call."""
        touched, self._touched = self._touched, []
        return touched

    def take_landed(self) -> list[int]:
        """Ids of the groups that have ceased to be in flight since the last call."""
        landed, self._landed = self._landed, []
        return landed

    def in_flight(
        self, group_ids: Iterable[int] | None = None
    ) -> dict[int, tuple[str, tuple[int, ...]]]:
        """Group id -> (prompt id, samples not arrived), of these groups or of all."""
        if group_ids is None:
            chosen = list(self.entries.values())
        else:
            chosen = [self.entries[i] for i in sorted(set(group_ids)) if i in self.entries]
        return {
            e.group_id: (e.prompt_id, e.missing(self.samples(e))) for e in chosen if not e.finished
        }

    def consume(self, entry: Entry) -> None:
        """The group was trained on for the last time."""
        self.ledger.consume(entry.group_id, entry.last_step)
        self._drop(entry, None)

    def evict(self, entry: Entry, reason: str) -> None:
        """Give up a group that has no fault."""
        self.ledger.evict(entry.group_id, reason)
        self._drop(entry, reason)

    def evict_stale(self, entry: Entry) -> None:
        """Evict a group that is too old; one that was already trained on leaves as consumed."""
        if entry.uses:
            self.consume(entry)
        else:
            self.evict(entry, STALE)

    def fail(self, entry: Entry, reason: str) -> None:
        """Give up a group that could not be finished."""
        self.ledger.fail(entry.group_id, reason)
        self._drop(entry, reason)

    def release(self, records: Iterable[Record]) -> None:
        """Nobody will read these records any more."""
        for record in records:
            if isinstance(record, RecordReference) and self.knows(record.shard):
                self._released[record.shard].append(record.key)

    def take_released(self, shard: str) -> list[int]:
        """Keys of a shard's records that were released since the last call."""
        return self._released.pop(shard, [])

    def knows(self, shard: str) -> bool:
        """Whether a shard is not lost."""
        return shard not in self._lost_shards

    def forget_shard(self, shard: str) -> None:
        """A shard is lost; what it still sends is not taken."""
        self._lost_shards.add(shard)
        self._released.pop(shard, None)

    def reopen(self, entry: Entry, *, fixed: bool) -> None:
        """A finished group has lost samples: it is in flight again. `fixed`: it must come back."""
        entry.finished = False
        self.waited_for += 1
        self._touched.append(entry.group_id)
        self._landed = [i for i in self._landed if i != entry.group_id]
        if fixed:
            self.fix(entry)

    def fix(self, entry: Entry) -> None:
        """A group in flight that a batch has."""
        entry.fixed = True
        self.redrawn.add(entry.group_id)

    def finish(self, entry: Entry) -> None:
        """All of its samples have arrived, and it may be trained on."""
        self._touched.append(entry.group_id)
        self.redrawn.discard(entry.group_id)
        entry.finished = True
        entry.arrival_version = self.learner
        self._land(entry)

    def _land(self, entry: Entry) -> None:
        self.waited_for -= 1
        self._landed.append(entry.group_id)

    def _drop(self, entry: Entry, reason: str | None) -> None:
        self._touched.append(entry.group_id)
        self.accounts.departed(entry.task, reason)
        self.redrawn.discard(entry.group_id)
        self.release(entry.records())
        self.bytes -= entry.held
        together = self.admitted_at[entry.admitted_version]
        del together[entry.group_id]
        if not together:
            del self.admitted_at[entry.admitted_version]
        if not entry.finished:
            self._land(entry)
        del self.entries[entry.group_id]

    def check(self) -> None:
        """Raise LedgerError unless ledger, live groups and bytes agree."""
        self.ledger.check()
        if self.ledger.live != self.entries.keys():
            differing = sorted(self.ledger.live ^ set(self.entries))
            raise LedgerError(f"ledger and live groups disagree on {differing}")
        there = sum(not e.finished for e in self.entries.values())
        if self.waited_for != there:
            raise LedgerError(f"buffer: {self.waited_for} groups in flight counted, not {there}")
        held = sum(e.held for e in self.entries.values())
        if self.bytes != held:
            raise LedgerError(f"buffer: {self.bytes} bytes counted, the live groups hold {held}")

    def check_group(self, entry: Entry) -> None:
        """Raise LedgerError unless the bytes of a group are those that were counted."""
        if entry.held != entry.size:
            raise LedgerError(
                f"buffer: {entry.held} bytes counted of group {entry.group_id}, it holds "
                f"{entry.size}"
            )

    def next_audited(self, count: int) -> list[Entry]:
        """So many live groups, all of them in turn over several calls."""
        if not self._unaudited:
            self._unaudited = list(self.entries)
        taken, self._unaudited = self._unaudited[-count:], self._unaudited[:-count]
        return [self.entries[i] for i in taken if i in self.entries]
