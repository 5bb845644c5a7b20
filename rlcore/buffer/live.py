"""The groups that were admitted and have not departed, with their accounts."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from rlcore.buffer.ledger import Ledger, LedgerError, TaskAccounts
from rlcore.buffer.specs import TaskShare
from rlcore.references import Record, RecordReference
from rlcore.serialization import RecordHeader, StoredEpisode, StoredGroup
from rlcore.types import FinishReason, Score

PASSED = 1 - 1e-6  # of a grade that is correct, whatever rounding did


@dataclass(slots=True)
class Attempt:
    """One drawing of a sample, of which records or score are still missing."""

    records: dict[int, tuple[RecordHeader, Record]] = field(default_factory=dict)  # by part
    score: Score | None = None
    since: float = field(default_factory=time.monotonic)  # when the first of them arrived

    @property
    def size(self) -> int:
        """Bytes of its records."""
        return sum(len(record) for _, record in self.records.values())

    @property
    def complete(self) -> bool:
        """True if the score and all parts of the record have arrived."""
        if self.score is None or not self.records:
            return False
        header, _ = next(iter(self.records.values()))
        return len(self.records) == header.parts


@dataclass(slots=True)
class ArrivedSample:
    """One sample whose record and score are both there; it is not changed, but replaced."""

    score: Score
    tokens: int  # sampled tokens
    finish_reason: FinishReason
    records: tuple[Record, ...]  # by part; empty where it will not be trained on

    @classmethod
    def of(cls, drawing: Attempt) -> ArrivedSample:
        """The sample of a complete drawing. A failed score keeps no record, and a record that
        cannot be trained on makes the score a failed one."""
        score = drawing.score
        assert score is not None
        parts = [drawing.records[part] for part in sorted(drawing.records)]
        for problem in (header.problem for header, _ in parts if header.problem):
            ids = score.group_id, score.sample_index, score.draw_id
            score = Score(*ids, "error", error=problem, seconds=score.seconds)
        return cls(
            score,
            sum(header.tokens for header, _ in parts),
            parts[-1][0].finish_reason,
            tuple(record for _, record in parts) if score.status == "ok" else (),
        )

    @property
    def usable(self) -> bool:
        return self.score.status == "ok"

    @property
    def passed(self) -> bool:
        """True if the grader judged the sample correct, by its part of that name or else by the
        reward."""
        reward = self.score.reward
        return reward is not None and self.score.parts.get("correct", reward) >= PASSED

    @property
    def size(self) -> int:
        """Bytes of its records."""
        return sum(map(len, self.records))


PLAIN = (
    *("group_id", "prompt_id", "admitted_version", "finished", "arrival_version"),
    *("uses", "last_step", "losses"),
)


class EntryCut(NamedTuple):
    """A live group at one moment."""

    plain: tuple[Any, ...]  # the fields PLAIN
    taken_by: list[int]
    samples: dict[int, ArrivedSample]  # by sample_index

    def ordered(self) -> list[tuple[int, ArrivedSample]]:
        """The samples by index."""
        return sorted(self.samples.items())

    def state(self) -> dict[str, Any]:
        """JSON-able state without records, only their number, and without scores."""
        samples = {
            index: {"tokens": s.tokens, "finish_reason": s.finish_reason, "records": len(s.records)}
            for index, s in self.ordered()
        }
        plain = dict(zip(PLAIN, self.plain, strict=True))
        return {**plain, "taken_by": self.taken_by, "samples": samples}


@dataclass(slots=True)
class LiveGroup:
    """One live group: its samples as they arrive, then its uses."""

    group_id: int
    prompt_id: str
    admitted_version: int
    samples: dict[int, ArrivedSample] = field(default_factory=dict)  # by sample_index
    # sample_index -> draw_id: a sample is drawn again when its first drawing seems lost
    drawings: dict[int, dict[str, Attempt]] = field(default_factory=dict)
    finished: bool = False
    arrival_version: int = 0
    uses: int = 0  # committed steps
    last_step: int = -1  # newest committed step that used it
    taken_by: list[int] = field(default_factory=list)  # uncommitted steps
    losses: int = 0  # times that the actor that sampled it was lost or late
    held: int = 0  # bytes of it that `LiveGroups.bytes` has counted
    # sampled again after a loss, although it is in a batch or was trained on: it is not filtered
    # again
    fixed: bool = False
    noted: bool = False  # its pass rate was

    @property
    def task(self) -> str:
        return self.prompt_id.split("/", 1)[0]

    @property
    def size(self) -> int:
        """Bytes of all records, incomplete drawings included."""
        incomplete = sum(d.size for found in self.drawings.values() for d in found.values())
        return incomplete + sum(s.size for s in self.samples.values())

    def records(self) -> list[Record]:
        """All records, incomplete drawings included."""
        drawn = (d for found in self.drawings.values() for d in found.values())
        incomplete = [record for d in drawn for _, record in d.records.values()]
        return incomplete + [r for s in self.samples.values() for r in s.records]

    @property
    def tokens(self) -> int:
        """Sampled tokens that will be trained on."""
        return sum(s.tokens for s in self.samples.values() if s.records)

    def missing(self, samples_per_group: int) -> tuple[int, ...]:
        """Sample indices to ask for, so that the group has as many samples as it needs."""
        absent = [i for i in range(samples_per_group) if i not in self.samples]
        return tuple(absent[: max(0, samples_per_group - len(self.samples))])

    def usable(self) -> list[ArrivedSample]:
        """Scored samples by sample_index, whether or not selection kept them."""
        return [s for _, s in sorted(self.samples.items()) if s.usable]

    def kept(self) -> list[ArrivedSample]:
        """Samples with records, by sample_index: what is trained on."""
        return [s for _, s in sorted(self.samples.items()) if s.records]

    def stored(self) -> StoredGroup:
        """The group as a learner rank fetches it."""
        episodes = tuple(StoredEpisode(s.score, s.records) for s in self.kept())
        return StoredGroup(
            self.group_id, self.prompt_id, self.admitted_version, self.arrival_version, episodes
        )

    def cut(self) -> EntryCut:
        """The group at this moment, unaffected by later changes; a checkpoint stops the buffer only
        for this.

        Incomplete drawings are left out: after a resume their samples are requested again.
        """
        return EntryCut(_plain(self), self.taken_by.copy(), self.samples.copy())

    @classmethod
    def from_state(
        cls, state: dict[str, Any], records: Iterator[Record], scores: Iterator[Score]
    ) -> LiveGroup:
        """The inverse of `EntryCut.state`; takes its records and scores off the iterators, in
        order."""
        samples = {
            int(index): ArrivedSample(
                next(scores),
                fields["tokens"],
                fields["finish_reason"],
                tuple(next(records) for _ in range(fields["records"])),
            )
            for index, fields in state["samples"].items()
        }
        plain = {name: state[name] for name in PLAIN}
        return cls(**plain, taken_by=state["taken_by"], samples=samples)


_plain = attrgetter(*PLAIN)
STALE = "stale"


class LiveGroups:
    """Live groups by id, the ledger, the bytes they hold, and the versions that their age is
    measured against.

    `published`: the version that every actor serves. `learner`: optimizer steps done.
    """

    def __init__(
        self, samples_per_group: int, tasks: Mapping[str, TaskShare] | None = None
    ) -> None:
        """`tasks`: settings of tasks whose groups have their own size, by the first part of a
        prompt id."""
        self._samples_per_group = samples_per_group
        self._tasks = dict(tasks or {})
        self.ledger = Ledger()
        self.accounts = TaskAccounts()
        self.entries: dict[int, LiveGroup] = {}
        self.bytes = 0
        self.arrived_bytes = (0, 0)  # groups that arrived whole so far, bytes that they then had
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

    def samples(self, entry: LiveGroup) -> int:
        """Samples that a group has when it is complete."""
        share = self._tasks.get(entry.task) if self._tasks else None
        return self._samples_per_group if share is None else share.samples

    def remembers(self, entry: LiveGroup) -> bool:
        """Return whether the pass rate of a group is recorded."""
        share = self._tasks.get(entry.task)
        return share is not None and share.remember

    @property
    def tasks(self) -> tuple[str, ...]:
        """Labels of several training tasks; empty in a run with one."""
        return tuple(self._tasks)

    @property
    def most_samples(self) -> int:
        """Samples of the largest groups."""
        return max([self._samples_per_group, *(t.samples for t in self._tasks.values())])

    def admit(self, prompt_id: str) -> int:
        """Open one group at the published version; its id."""
        group_id = self.ledger.admit()
        self.entries[group_id] = LiveGroup(group_id, prompt_id, self.published)
        self.admitted_at.setdefault(self.published, {})[group_id] = None
        self._touched.append(group_id)
        self.waited_for += 1
        return group_id

    def unfinished(self) -> bool:
        """Return whether any group is in flight."""
        return self.waited_for > 0

    def restore(self, entries: Iterable[LiveGroup]) -> None:
        """Continue with these groups, ascending by id."""
        self.entries = {e.group_id: e for e in entries}
        self.admitted_at = {}
        for e in self.entries.values():
            self.admitted_at.setdefault(e.admitted_version, {})[e.group_id] = None
            e.held = e.size
        self.bytes = sum(e.held for e in self.entries.values())
        self.waited_for = sum(not e.finished for e in self.entries.values())

    def resize(self, entry: LiveGroup) -> None:
        """Account for the bytes that a group holds now."""
        size = entry.size
        self.bytes += size - entry.held
        entry.held = size

    def mean_bytes(self) -> float:
        """Bytes of a group that has arrived whole, before any of its samples are dropped; 0 as
        long as none has."""
        count, size = self.arrived_bytes
        return size / max(1, count)

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

    def consume(self, entry: LiveGroup) -> None:
        """The group was trained on for the last time."""
        self.ledger.consume(entry.group_id, entry.last_step)
        self._drop(entry, None)

    def evict(self, entry: LiveGroup, reason: str) -> None:
        """Give up a group that has no fault."""
        self.ledger.evict(entry.group_id, reason)
        self._drop(entry, reason)

    def evict_stale(self, entry: LiveGroup) -> None:
        """Evict a group that is too old; one that was already trained on leaves as consumed."""
        if entry.uses:
            self.consume(entry)
        else:
            self.evict(entry, STALE)

    def fail(self, entry: LiveGroup, reason: str) -> None:
        """Give up a group that could not be finished."""
        self.ledger.fail(entry.group_id, reason)
        self._drop(entry, reason)

    def release(self, records: Iterable[Record]) -> None:
        """Note that no process will read these records again."""
        for record in records:
            if isinstance(record, RecordReference) and self.knows(record.shard):
                self._released[record.shard].append(record.key)

    def take_released(self, shard: str) -> list[int]:
        """Keys of a shard's records that were released since the last call."""
        return self._released.pop(shard, [])

    def knows(self, shard: str) -> bool:
        """Return whether a shard is not lost."""
        return shard not in self._lost_shards

    def forget_shard(self, shard: str) -> None:
        """A shard is lost; later reports of it are not taken."""
        self._lost_shards.add(shard)
        self._released.pop(shard, None)

    def reopen(self, entry: LiveGroup, *, fixed: bool) -> None:
        """A finished group has lost samples and is in flight again. `fixed`: a batch needs it, so
        it is not filtered."""
        entry.finished = False
        self.waited_for += 1
        self._touched.append(entry.group_id)
        self._landed = [i for i in self._landed if i != entry.group_id]
        if fixed:
            self.fix(entry)

    def fix(self, entry: LiveGroup) -> None:
        """Note that a batch has this group, which is in flight."""
        entry.fixed = True
        self.redrawn.add(entry.group_id)

    def finish(self, entry: LiveGroup) -> None:
        """Note that all samples of a group have arrived and that it may be trained on."""
        self._touched.append(entry.group_id)
        self.redrawn.discard(entry.group_id)
        entry.finished = True
        entry.arrival_version = self.learner
        self._land(entry)

    def _land(self, entry: LiveGroup) -> None:
        self.waited_for -= 1
        self._landed.append(entry.group_id)

    def _drop(self, entry: LiveGroup, reason: str | None) -> None:
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

    def check_group(self, entry: LiveGroup) -> None:
        """Raise LedgerError unless the bytes of a group are those that were counted."""
        if entry.held != entry.size:
            raise LedgerError(
                f"buffer: {entry.held} bytes counted of group {entry.group_id}, it holds "
                f"{entry.size}"
            )

    def next_audited(self, count: int) -> list[LiveGroup]:
        """The next live groups to audit, `count` of them; several calls go through all in turn."""
        if not self._unaudited:
            self._unaudited = list(self.entries)
        taken, self._unaudited = self._unaudited[-count:], self._unaudited[:-count]
        return [self.entries[i] for i in taken if i in self.entries]
