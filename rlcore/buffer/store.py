"""The replay buffer: admits groups, collects their samples, assigns batches to steps, and accounts
for every group.

Plain Python and single-threaded: whatever hosts it (a Ray actor with one thread of execution) calls
it from one thread at a time. It has no clock; the caller keeps the deadlines of requests and
reports a group as `lost`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlcore.buffer.admission import ByteLimit
from rlcore.buffer.batches import Batches
from rlcore.buffer.intake import Intake, batch_metrics, kind_metrics, task_metrics
from rlcore.buffer.ledger import Ledger
from rlcore.buffer.live import ArrivedSample, LiveGroup, LiveGroups
from rlcore.buffer.shard import ShardReport
from rlcore.buffer.specs import BatchingSpec, SelectionSpec, TaskShare
from rlcore.references import Record, RecordReference
from rlcore.seeding import derive_seed
from rlcore.serialization import StoredEpisode, StoredGroup
from rlcore.types import Score

PEEK_PHASES = 2  # newest phases whose displayed samples stay readable
InFlight = dict[int, tuple[str, tuple[int, ...]]]  # group id -> (prompt id, samples not arrived)


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """A batch that was taken. Example: TakenBatch([(17, 40)], {"reward/mean": 0.5})"""

    groups: list[tuple[int, int]]  # (group id, sampled tokens), ascending by id
    metrics: dict[str, float]  # rewards and lengths, see `statistics.batch_metrics`


class ReplayBuffer:
    """The facade of its three parts: `live` (groups and accounts), `intake` (arrival) and `batches`
    (the order of training). `reports` describes it, `journal` makes it durable.

    samples_per_group n: a group is complete when n samples have arrived. limit: bytes of records
    above which nothing is admitted. keep_samples: groups of a batch that `peek` can show.
    tasks: group sizes and shares of several tasks, by the part of a prompt id before the first "/";
    None: a run with one. kinds: labels of actors, of a run with several.
    """

    def __init__(
        self,
        batching: BatchingSpec,
        selection: SelectionSpec,
        *,
        samples_per_group: int,
        limit: ByteLimit,
        run_seed: int,
        keep_samples: int,
        tasks: Mapping[str, TaskShare] | None = None,
        kinds: Sequence[str] = (),
    ) -> None:
        self._kinds = kinds
        self._run_seed = run_seed
        self._keep_samples = keep_samples
        self._filter_limit = selection.filter_limit
        self.live = LiveGroups(samples_per_group, tasks)
        self.intake = Intake(self.live, selection)
        self.batches = Batches(
            self.live,
            batching,
            limit=limit,
            run_seed=run_seed,
            tasks=tasks,
        )
        self._peeks: dict[int, list[list[StoredEpisode]]] = {}  # by group

    @property
    def ledger(self) -> Ledger:
        """Accounts of every group ever admitted."""
        return self.live.ledger

    @property
    def next_step(self) -> int:
        """The step that `take` assigns a batch to next."""
        return self.batches.next_step

    def set_versions(self, published: int, learner: int) -> None:
        """`published`: the version that every actor serves. `learner`: optimizer steps done."""
        self.live.published = published
        self.live.learner = learner
        self.batches.next_step = max(self.batches.next_step, learner)
        self.batches.expire()

    def room(self, *, total: int | None = None, all_done: bool = False) -> int:
        """Groups that may be admitted now, at the published version.

        total: groups of the whole run. all_done: 0 while anything is in flight, since synchronous
        schedules admit in whole waves, so that which samples share an engine step never depends on
        timing. Raises UserError if the limit is too small for a phase, or if dynamic sampling has
        filtered all of a task for too long.
        """
        if all_done and self.live.unfinished():
            return 0
        room = self.batches.room()
        if total is not None:
            room = max(0, min(room, total - self.ledger.consumed - len(self.ledger.live)))
        if room:
            self.live.accounts.check(self._filter_limit)
        return room

    def sampled(self, *, total: int) -> bool:
        """Return whether every group that may be admitted at the published version, of `total` over
        the whole run, has been admitted, and none is in flight."""
        if self.live.unfinished():
            return False
        left = total - self.ledger.consumed - len(self.ledger.live)
        return left <= 0 or self.batches.admissible() == 0

    def admit(self, prompt_ids: Sequence[str]) -> list[int]:
        """Open one group for each of the first of these prompts that the buffer takes; their ids,
        ascending.

        Capacity and admission are one call, since a sample that arrives between two calls would
        reduce the capacity.
        """
        return [self.live.admit(prompt) for prompt in prompt_ids[: self.room()]]

    def in_flight(self, group_ids: Iterable[int] | None = None) -> InFlight:
        """Return the samples to request from actors: samples of these groups, or of all, that have
        not arrived.

        Groups that are finished or have departed are left out.
        """
        return self.live.in_flight(group_ids)

    def lost(self, group_ids: Iterable[int], limit: int) -> tuple[InFlight, dict[int, str]]:
        """Count a loss for each of these groups that is in flight. Returns (their missing samples;
        the groups given up since they were lost `limit` times, with their prompt ids)."""
        given_up = {}
        again = []
        for group_id in self.live.in_flight(group_ids):
            entry = self.live.entries[group_id]
            entry.losses += 1
            if entry.losses < limit:
                again.append(group_id)
            else:
                self.live.fail(entry, f"lost_{limit}_times")
                given_up[group_id] = entry.prompt_id
        return self.live.in_flight(again), given_up

    def add_records(self, records: Sequence[bytes]) -> None:
        """Serialised trajectories of training samples, in any order, before or after their scores.

        Only headers are read. A record that cannot be trained on fails its sample, and one that
        does not name its sample is counted. Raises ValueError, taking none of them, if one is of
        another purpose or was never asked for. So it does if one is of another prompt than its
        group, or has a token older than its group's admission.
        """
        self.intake.add_records(records)

    def add_report(self, report: ShardReport) -> None:
        """Take a shard's report: headers and references as `add_records` takes records, and scores.
        The records of a lost shard are not taken. Raises ValueError as `add_records` does."""
        self.intake.add_read([(h, r) for h, r in report.kept if self.live.knows(r.shard)])
        self.intake.add_scores(report.scores)
        self.intake.unreadable += report.unreadable

    def add_scores(self, scores: Sequence[Score]) -> None:
        """Scores of training samples. Raises ValueError, taking none of them, if one was never
        asked for. One whose numbers cannot be trained on is taken as a failed score."""
        self.intake.add_scores(scores)

    def ready(self, step: int, *, wave: int | None = None) -> bool:
        """Return whether `take(step)` would return a batch. Raises ValueError for another step than
        the next.

        wave: groups of the whole run, in synchronous schedules. All that may be admitted must have
        arrived first, so that a phase cut short by the end of a plan begins as a whole one does.
        """
        if wave is not None and (self.live.unfinished() or self.room(total=wave)):
            return False
        return self.batches.choose(step) is not None

    def take(self, step: int) -> TakenBatch:
        """Fix the batch of `step`. Raises ValueError if it is not ready, or not the next step."""
        entries = self.batches.take(step)
        if entries is None:
            raise ValueError(f"buffer: the batch of step {step} was asked for before it was ready")
        metrics = batch_metrics(entries) | task_metrics(entries, self.live.tasks)
        metrics |= kind_metrics(entries, self._kinds)
        taken = TakenBatch([(e.group_id, e.tokens) for e in entries], metrics)
        self._remember(step, entries)
        self.batches.expire()
        return taken

    def stored(self, step: int, group_ids: Sequence[int]) -> list[StoredGroup]:
        """Groups of a batch that was taken and is not committed, as bytes, for a learner rank."""
        others = set(group_ids) - set(self.batches.taken.get(step, ()))
        if others:
            raise ValueError(f"buffer: groups {sorted(others)} are not in a taken batch {step}")
        return [self.live.entries[i].stored() for i in group_ids]

    def whole(self, step: int, group_ids: Sequence[int]) -> bool:
        """Return whether `stored` can give these groups: none is being sampled again."""
        return self.live.redrawn.isdisjoint(group_ids)

    def commit(self, step: int) -> None:
        """The batch of `step` was trained on: its records may be dropped."""
        self.batches.commit(step)

    def rollback(self, step: int) -> None:
        """Put back the uncommitted batches of `step` and later; `take` will return the same ones
        again."""
        self.batches.rollback(step)

    def give_up(self, reason: str) -> int:
        """Evict everything that no step was trained on, batches that were taken and are not
        committed included; the number of groups. Groups that were trained on leave as consumed."""
        return self.batches.give_up(reason)

    def peek(self, step: int, n: int) -> list[StoredEpisode]:
        """Samples of up to n groups of the batch of `step`, if one of the newest phases, or this
        buffer's first, begins with it. The first group, if possible one whose rewards differ, is
        whole; each other has one sample."""
        return [sample for group in self._peeks.get(step, [])[:n] for sample in group]

    def _remember(self, step: int, entries: Sequence[LiveGroup]) -> None:
        if not entries or (self._peeks and step != self.batches.bound.phases.start(step)):
            return
        generator = np.random.default_rng(derive_seed(self._run_seed, "buffer_peek", step))
        order = [entries[i] for i in generator.permutation(len(entries)).tolist()]
        whole, *others = _telling_first(_in_turn(order))[: self._keep_samples]
        chosen = [whole.kept(), *(entry.kept()[:1] for entry in others)]
        self._peeks[step] = [[StoredEpisode(s.score, s.records) for s in part] for part in chosen]
        for old in sorted(self._peeks)[:-PEEK_PHASES]:
            del self._peeks[old]


def _in_turn(entries: Sequence[LiveGroup]) -> list[LiveGroup]:
    """Groups in the order: the first of each task, then the second of each, and so on."""
    places: Counter[str] = Counter()
    keyed = []
    for entry in entries:
        keyed.append((places[entry.task], entry))
        places[entry.task] += 1
    return [entry for _, entry in sorted(keyed, key=lambda pair: pair[0])]


def _telling_first(entries: Sequence[LiveGroup]) -> list[LiveGroup]:
    """Groups in the order: the first whose rewards differ, since it shows what is learned, then the
    others."""
    telling = (e for e in entries if len({s.score.reward for s in e.kept()}) > 1)
    first = next(telling, entries[0])
    return [first, *(entry for entry in entries if entry is not first)]


AUDITED = 256  # groups that are looked at in one call


def audit(buffer: ReplayBuffer, groups: int | None = None) -> None:
    """Raise LedgerError unless all accounts match: the counts of all groups, and the contents of
    the next `groups` groups in turn; None: of all."""
    live, batches = buffer.live, buffer.batches
    live.check()
    batches.check()
    entries = list(live.entries.values()) if groups is None else live.next_audited(groups)
    for entry in entries:
        live.check_group(entry)
        batches.check_group(entry)


def metrics(buffer: ReplayBuffer) -> dict[str, float]:
    """Present values of `buffer/*` and `ledger/*`. Raises LedgerError unless all accounts match, as
    far as `audit` looks."""
    audit(buffer, AUDITED)
    live, intake = buffer.live, buffer.intake
    finished = len(live.entries) - live.waited_for
    return {
        "buffer/groups": float(finished),
        "buffer/in_flight": float(live.waited_for),
        "buffer/bytes": float(live.bytes),
        "buffer/duplicates": float(intake.duplicates),
        "buffer/late": float(intake.late),
        "buffer/unreadable": float(intake.unreadable),
        "buffer/resampled": float(live.resampled),
        **intake.metrics(),
        **live.ledger.metrics(),
        **(live.accounts.metrics() if live.tasks else {}),
    }


def waiting_for(buffer: ReplayBuffer, step: int) -> str:
    """One line for an error message: what `take(step)` lacks."""
    waiting = buffer.batches.waiting()
    line = (
        f"step {step} needs {buffer.batches.bound.groups_per_step} groups: {waiting.finished} "
        f"finished, {len(waiting) - waiting.finished} in flight"
    )
    for group_id, (prompt_id, missing) in list(buffer.in_flight().items())[:1]:
        line += (
            f"; the oldest in flight is group {group_id} ({prompt_id}), with {len(missing)} of "
            f"{buffer.live.samples(buffer.live.entries[group_id])} samples missing"
        )
    failed, _, sentence = failed_scores(buffer)
    return f"{line}; {sentence}" if failed else line


def failed_scores(buffer: ReplayBuffer) -> tuple[int, int, str]:
    """The number of samples that could not be scored so far. The same number if no sample ever was
    and all failed for one reason, else 0. A clause that says so with the last reason."""
    errors, timeouts = buffer.ledger.score_errors, buffer.ledger.score_timeouts
    sentence = (
        f"{errors + timeouts} of {buffer.intake.totals.samples} samples so far could not be scored "
        f"({errors} errors, {timeouts} timeouts), the last: {buffer.intake.failed_score}"
    )
    alike = buffer.intake.alike if buffer.intake.alike == buffer.intake.totals.samples else 0
    return errors + timeouts, alike, sentence


# (group id, sample index, draw id) -> the records of that drawing, if they are written somewhere
Recover = Callable[[int, int, str], tuple[bytes, ...] | None]


# A shard is lost with its node: samples that only it had are requested again.
#
# A group keeps its id, its account and, since seeds depend on these, the seeds of its samples. It
# is in flight again until its samples have arrived a second time. A group that a batch has, or that
# was trained on before, stays in it: nothing filters it then. Records that a checkpoint holds are
# read back from there.


def lose_shard(buffer: ReplayBuffer, shard: str, recover: Recover) -> InFlight:
    """Account for the loss of a shard's records; returns the samples to request again."""
    live, promised = buffer.live, buffer.batches.promised()
    live.forget_shard(shard)
    again = []
    for entry in list(live.entries.values()):
        if not _forget(entry, shard, recover):
            continue
        live.resize(entry)
        if entry.finished:
            live.reopen(entry, fixed=bool(entry.uses) or entry.group_id in promised)
        live.resampled += 1
        again.append(entry.group_id)
    return live.in_flight(again)


def _forget(entry: LiveGroup, shard: str, recover: Recover) -> bool:
    """Drop a group's records in a shard; returns whether samples of it must be drawn again."""
    missing = False
    for drawings in entry.drawings.values():
        for draw_id, drawing in list(drawings.items()):
            if _inside(shard, (record for _, record in drawing.records.values())):
                del drawings[draw_id]
                missing = True
    for index, sample in list(entry.samples.items()):
        if not _inside(shard, sample.records):
            continue
        written = recover(entry.group_id, index, sample.score.draw_id)
        if written is None:
            del entry.samples[index]
            missing = True
        else:
            entry.samples[index] = ArrivedSample(
                sample.score, sample.tokens, sample.finish_reason, written
            )
    return missing


def _inside(shard: str, records: Iterable[Record]) -> bool:
    return any(isinstance(r, RecordReference) and r.shard == shard for r in records)
