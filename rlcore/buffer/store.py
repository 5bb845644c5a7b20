"""The replay buffer: admits groups, collects their samples, hands out batches, and accounts for every group.

Plain Python and single-threaded: whoever hosts it (a Ray actor with one thread of execution) calls it from one thread
at a time. It has no clock; deadlines of requests belong to the caller, who ends a group with `fail_group`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rlcore.buffer.admission import Candidate, StalenessBound
from rlcore.buffer.entry import Arrivals, Entry, Sample, batch_metrics
from rlcore.buffer.ledger import Ledger, LedgerError
from rlcore.buffer.sampling import Policy, Sampler
from rlcore.buffer.selection import Select, SelectionPolicy, best_of
from rlcore.errors import UserError
from rlcore.seeding import derive_seed
from rlcore.serialization import TopkDtype, dump_trajectory, load_trajectory
from rlcore.types import Group, Trajectory

STALE = "stale"
REASON_CHARS = 300  # of a grader's words, in a message
PEEK_STEPS = 2  # newest steps whose sample trajectories stay readable


@dataclass(frozen=True, slots=True)
class Missing:
    """The samples of a live group that have not arrived: what to ask an actor for, or to ask again."""

    group_id: int
    prompt_id: str
    admitted_version: int
    sample_indices: tuple[int, ...]


class ReplayBuffer:
    """Implements `interfaces.Buffer`.

    A step is consumed in two phases: `take(step)` hands a batch out, `commit(step)` says that it was trained on.
    Until then its payload is kept and `rollback(step)` puts it back, to be handed out again as the same batch.

    groups_per_step G, steps_per_publish H, max_staleness eta: see `admission`. samples_per_group n: a group is
    complete when n samples have come. sampling, max_uses, task_weights, run_seed: see `sampling`. filter_equal,
    keep_best (of each group the best few), select (the same by a function), min_samples (default: the smaller of 2 and
    n): see `selection`. max_bytes: payload bytes above which nothing is admitted. topk_dtype: how trajectories given
    as objects are stored. keep_samples: trajectories of a batch that `peek` can show.
    """

    def __init__(
        self,
        groups_per_step: int,
        samples_per_group: int,
        *,
        steps_per_publish: int = 1,
        max_staleness: int = 0,
        sampling: Policy = "fifo",
        max_uses: int = 1,
        task_weights: Mapping[str, float] | None = None,
        filter_equal: bool = False,
        keep_best: int | None = None,
        select: Select | None = None,
        min_samples: int | None = None,
        max_bytes: int = 1 << 30,
        topk_dtype: TopkDtype = "float32",
        run_seed: int = 0,
        keep_samples: int = 8,
    ) -> None:
        if select is not None and keep_best is not None:
            raise ValueError("give either select or keep_best")
        chosen = select if keep_best is None else best_of(keep_best, samples_per_group)
        minimum = min(2, samples_per_group) if min_samples is None else min_samples
        self.samples_per_group, self.max_uses, self.max_bytes = samples_per_group, max_uses, max_bytes
        self.topk_dtype, self.run_seed, self.keep_samples = topk_dtype, run_seed, keep_samples
        self.bound = StalenessBound(groups_per_step, steps_per_publish, max_staleness)
        self.sampler = Sampler(self.bound, sampling, run_seed, max_uses, task_weights)
        self.selection = SelectionPolicy(minimum, filter_equal, chosen)
        self.ledger = Ledger()
        self.arrivals = Arrivals()
        self.duplicates = 0  # samples that had already come
        self.late = 0  # samples of groups that had already left
        self.failed_score = ""  # prompt id and reason of the newest sample that could not be scored
        self.published = 0
        self.learner = 0
        self.next_step = 0
        self._entries: dict[int, Entry] = {}
        self._taken: dict[int, list[int]] = {}  # uncommitted step -> ids
        self._pinned: dict[int, list[int]] = {}  # rolled back step -> ids it must get again
        self._batch_metrics: dict[int, dict[str, float]] = {}
        self._peeks: dict[int, list[bytes]] = {}
        self._bytes = 0
        self._completed_bytes = (0, 0)  # groups completed so far, their payload bytes

    # --- admission -----------------------------------------------------------------------------------------------

    def set_versions(self, published: int, learner: int) -> None:
        """Tell the versions: `published` as served by every actor, `learner` = optimizer steps done."""
        self.published, self.learner = published, learner
        self.next_step = max(self.next_step, learner)
        self._expire()

    def room(self, published_version: int) -> int:
        """Groups that may be admitted now. `published_version`: the oldest version any receiving actor may serve.

        0 while the payload is over `max_bytes`. Raises UserError if less than one step's groups exceeds it.
        """
        waiting = self._waiting()
        capacity = self.bound.capacity(published_version, self._horizon)
        room = max(0, capacity - sum(c.uses_left for c in waiting)) // self.max_uses
        missing = max(0, self.bound.groups_per_step - len(waiting))
        if capacity:  # a batch needs G different groups, however often each may be used
            room = max(room, missing)
        return self._fitting(room, waiting, missing)

    def _fitting(self, room: int, waiting: Sequence[Candidate], missing: int) -> int:
        """How many of `room` fit, those in flight reckoned at the mean size so far; at least what a step lacks."""
        free = self.max_bytes - self._bytes
        if free <= 0:
            if missing and not self._taken and not self._pinned:
                raise UserError(
                    f"cluster.buffer_mib={self.max_bytes / 2**20:g} is too small: {len(waiting)} groups fill it, and a"
                    f" step needs schedule.groups_per_step={self.bound.groups_per_step}; raise it."
                )
            return 0
        count, size = self._completed_bytes
        if not size:
            return room
        in_flight = sum(not c.finished for c in waiting)
        return min(room, max(missing, int(free // (size / count)) - in_flight))

    def admit(self, prompt_ids: Sequence[str], published_version: int) -> list[int]:
        """Open one group per prompt; returns their ids, ascending. Raises ValueError if there is no room for all."""
        if len(prompt_ids) > (room := self.room(published_version)):
            raise ValueError(f"admit: {len(prompt_ids)} groups for a room of {room} at version {published_version}")
        ids = [self.ledger.admit() for _ in prompt_ids]
        self._entries |= {i: Entry(i, prompt, published_version) for i, prompt in zip(ids, prompt_ids)}
        return ids

    # --- arrival -------------------------------------------------------------------------------------------------

    def add(self, trajectories: Sequence[Trajectory | bytes]) -> None:
        """Scored training trajectories, as objects or `dump_trajectory` bytes, in any order.

        A second copy of a sample, or a sample of a group that has left, is counted and ignored. Raises ValueError,
        taking none of them, if one is malformed, unscored, of no group ever admitted, or older than its admission.
        """
        dtype = self.topk_dtype
        arrived = [
            (load_trajectory(t), t) if isinstance(t, bytes) else (t, dump_trajectory(t, dtype)) for t in trajectories
        ]
        for t, _ in arrived:
            self._check(t)
        for t, payload in arrived:
            self._add(t, payload)

    def _check(self, t: Trajectory) -> None:
        if t.purpose != "train" or t.score_status == "pending":
            raise ValueError(f"buffer: trajectory {t.request_id} is not a scored training sample ({t.score_status})")
        if t.reward is not None and not math.isfinite(t.reward):
            raise ValueError(f"buffer: trajectory {t.request_id} has reward {t.reward}; that is a failed score")
        if not self.ledger.known(t.group_id) or not 0 <= t.sample_index < self.samples_per_group:
            raise ValueError(f"buffer: trajectory {t.request_id} was never asked for")
        entry = self._entries.get(t.group_id)
        if entry is None:
            return
        if t.prompt_id != entry.prompt_id:
            raise ValueError(f"buffer: trajectory {t.request_id} is of {t.prompt_id}, its group of {entry.prompt_id}")
        if len(t.token_version) and int(t.token_version.min()) < entry.admitted_version:
            raise ValueError(
                f"buffer: trajectory {t.request_id} has tokens of version {int(t.token_version.min())}, but its group"
                f" was admitted at published version {entry.admitted_version}: actor {t.actor_id} served an older one"
            )

    def _add(self, t: Trajectory, payload: bytes) -> None:
        entry = self._entries.get(t.group_id)
        if entry is None:
            self.late += 1
            return
        if t.sample_index in entry.samples:
            self.duplicates += 1
            return
        sample = Sample.of(t, payload)
        entry.samples[t.sample_index] = sample
        self.arrivals.add(sample)
        self._bytes += len(sample.payload or b"")
        self.ledger.score_errors += t.score_status == "error"
        self.ledger.score_timeouts += t.score_status == "timeout"
        if not sample.usable:
            self.failed_score = f"{t.prompt_id}: {t.score_error or t.score_status}"[:REASON_CHARS]
        if len(entry.samples) == self.samples_per_group:
            self._complete(entry)

    def _complete(self, entry: Entry) -> None:
        usable = entry.usable()
        verdict = self.selection.judge([s.reward for s in usable if s.reward is not None])
        if verdict.failed:
            self.ledger.fail(entry.group_id, verdict.failed)
            return self._drop(entry)
        if verdict.evicted:
            self.ledger.evict(entry.group_id, verdict.evicted)
            return self._drop(entry)
        before = entry.size
        for position, sample in enumerate(usable):
            if position not in verdict.kept:
                sample.payload = None
        self._bytes += entry.size - before
        count, size = self._completed_bytes
        self._completed_bytes = (count + 1, size + entry.size)
        entry.finished, entry.arrival_version = True, self.learner

    def fail_group(self, group_id: int, reason: str) -> bool:
        """Give up a group in flight (e.g. it was lost too often). False if it has finished or left."""
        entry = self._entries.get(group_id)
        if entry is None or entry.finished:
            return False
        self.ledger.fail(group_id, reason)
        self._drop(entry)
        return True

    def lost(self, group_ids: Iterable[int], limit: int) -> list[int]:
        """Count a loss for each of these that is in flight; those lost `limit` times are given up and returned."""
        given_up = []
        for group_id in sorted(set(group_ids)):
            entry = self._entries.get(group_id)
            if entry is None or entry.finished:
                continue
            entry.losses += 1
            if entry.losses >= limit and self.fail_group(group_id, f"lost_{limit}_times"):
                given_up.append(group_id)
        return given_up

    def reissue(self, group_ids: Iterable[int] | None = None) -> list[Missing]:
        """The samples still missing, of these groups or of all in flight; groups finished or gone are left out."""
        wanted = self._entries if group_ids is None else [i for i in sorted(set(group_ids)) if i in self._entries]
        indices = range(self.samples_per_group)
        return [
            Missing(e.group_id, e.prompt_id, e.admitted_version, tuple(i for i in indices if i not in e.samples))
            for e in (self._entries[i] for i in wanted)
            if not e.finished
        ]

    # --- consumption ---------------------------------------------------------------------------------------------

    def ready(self, step: int) -> bool:
        """Whether `take(step)` would return a batch."""
        return self._choose(step) is not None

    def take(self, step: int) -> list[Group] | None:
        """The groups for `step`, ascending by id, or None if they are not there yet. Steps are taken in order.

        Raises ValueError for another step than the next one.
        """
        ids = self._choose(step)
        if ids is None:
            return None
        entries = [self._entries[i] for i in ids]
        self._pinned.pop(step, None)
        self._taken[step] = ids
        self.next_step = step + 1
        for entry in entries:
            entry.taken_by.append(step)
        self.sampler.confirm([e.task for e in entries])
        self._batch_metrics[step] = batch_metrics(entries)
        self._remember(step, entries)
        self._expire()
        return [e.decode() for e in entries]

    def commit(self, step: int) -> None:
        """The batch of `step` was trained on: its payload may go."""
        for group_id in self._taken.pop(step):
            entry = self._entries[group_id]
            entry.taken_by.remove(step)
            entry.uses += 1
            entry.last_step = max(entry.last_step, step)
            if not entry.taken_by and (entry.uses >= self.max_uses or self._expired(entry)):
                self.ledger.consume(group_id, entry.last_step)
                self._drop(entry)
        self._batch_metrics = {s: m for s, m in self._batch_metrics.items() if s >= step}

    def rollback(self, step: int) -> None:
        """Put back the uncommitted batches of `step` and later; `take` will hand out the same ones again."""
        for later in sorted((s for s in self._taken if s >= step), reverse=True):
            ids = self._taken.pop(later)
            self._pinned[later] = ids
            for group_id in ids:
                self._entries[group_id].taken_by.remove(later)
            self.sampler.confirm([self._entries[i].task for i in ids], sign=-1)
            self.next_step = later

    def batch_metrics(self, step: int) -> dict[str, float]:
        """Rewards and lengths of the batch taken for `step` (until the next commit); see `entry.batch_metrics`."""
        return self._batch_metrics[step]

    def peek(self, step: int, n: int) -> list[Trajectory]:
        """Up to n trajectories, each of another group, of the batch of `step`, if it is one of the newest taken."""
        return [load_trajectory(payload) for payload in self._peeks.get(step, [])[:n]]

    def _remember(self, step: int, entries: Sequence[Entry]) -> None:
        generator = np.random.default_rng(derive_seed(self.run_seed, "buffer_peek", step))
        shown = generator.permutation(len(entries))[: self.keep_samples].tolist()
        payloads = [s.payload for i in shown for s in entries[i].kept()[:1]]
        self._peeks[step] = [p for p in payloads if p is not None]
        self._peeks = {s: p for s, p in self._peeks.items() if s > step - PEEK_STEPS}

    def _choose(self, step: int) -> list[int] | None:
        if step != self.next_step:
            raise ValueError(f"buffer: step {step} is out of order, the next one to take is {self.next_step}")
        if step in self._pinned:
            return self._pinned[step]
        waiting = self._waiting()
        finished = sum(c.finished for c in waiting)
        if finished < self.bound.groups_per_step:
            return None
        needs_pool = self.sampler.hard_cap and self.bound.synchronous
        complete = needs_pool and finished == len(waiting) and self.room(self.published) == 0
        return self.sampler.draw(waiting, step, pool_complete=complete)

    # --- leaving -------------------------------------------------------------------------------------------------

    def _waiting(self) -> list[Candidate]:
        """Live groups that a later step may use, but for those a rolled back step will get again."""
        pinned = {i for ids in self._pinned.values() for i in ids}
        deadline, uses = self.bound.deadline, self.max_uses
        return [
            Candidate(e.group_id, deadline(e.admitted_version), e.finished, e.task, uses - e.uses - len(e.taken_by))
            for e in self._entries.values()
            if e.uses + len(e.taken_by) < uses and e.group_id not in pinned
            if not (e.taken_by and self._expired(e))  # it leaves at the commit
        ]

    @property
    def _horizon(self) -> int:
        """The first step whose batch is not fixed yet: rolled back steps will get theirs again."""
        return self.next_step + len(self._pinned)

    def _expired(self, entry: Entry) -> bool:
        return self.bound.deadline(entry.admitted_version) < self._horizon

    def _expire(self) -> None:
        """The hard cap of policies that may pass a group over. A group already trained on leaves as consumed."""
        if not self.sampler.hard_cap:
            return
        pinned = {i for ids in self._pinned.values() for i in ids}
        for entry in [e for e in self._entries.values() if self._expired(e)]:
            if not entry.taken_by and entry.group_id not in pinned:
                self._evict_stale(entry)

    def _evict_stale(self, entry: Entry) -> None:
        if entry.uses:
            self.ledger.consume(entry.group_id, entry.last_step)
        else:
            self.ledger.evict(entry.group_id, STALE)
        self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        self._bytes -= entry.size
        del self._entries[entry.group_id]

    # --- accounts ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises LedgerError unless ledger, stored groups, bytes and batches agree."""
        self.ledger.check()
        if self.ledger.live != set(self._entries):
            raise LedgerError(f"ledger and store disagree on {sorted(self.ledger.live ^ set(self._entries))}")
        if self._bytes != sum(e.size for e in self._entries.values()):
            raise LedgerError(f"buffer: {self._bytes} bytes counted, which is not what the stored groups hold")
        taken = {(s, i) for s, ids in self._taken.items() for i in ids}
        if taken != {(s, e.group_id) for e in self._entries.values() for s in e.taken_by}:
            raise LedgerError("buffer: uncommitted batches and stored groups disagree")

    def metrics(self) -> dict[str, float]:
        """`buffer/*` and `ledger/*` as they stand now."""
        finished = sum(e.finished for e in self._entries.values())
        return {
            "buffer/groups": float(finished),
            "buffer/in_flight": float(len(self._entries) - finished),
            "buffer/bytes": float(self._bytes),
            "buffer/duplicates": float(self.duplicates),
            "buffer/late": float(self.late),
            **self.arrivals.metrics(),
            **self.ledger.metrics(),
        }

    def waiting_for(self, step: int) -> str:
        """One line for an error message: what `take(step)` lacks."""
        waiting = self._waiting()
        finished = sum(c.finished for c in waiting)
        line = (
            f"step {step} needs {self.bound.groups_per_step} groups: {finished} finished,"
            f" {len(waiting) - finished} in flight"
        )
        for oldest in self.reissue()[:1]:
            line += (
                f"; the oldest in flight is group {oldest.group_id} ({oldest.prompt_id}), with"
                f" {len(oldest.sample_indices)} of {self.samples_per_group} samples missing"
            )
        failed, sentence = self.failed_scores()
        return f"{line}; {sentence}" if failed else line

    def failed_scores(self) -> tuple[int, str]:
        """Samples that could not be scored so far, and a clause that says so with the last reason."""
        errors, timeouts, arrived = self.ledger.score_errors, self.ledger.score_timeouts, self.arrivals.samples
        sentence = (
            f"{errors + timeouts} of {arrived} samples so far could not be scored"
            f" ({errors} errors, {timeouts} timeouts), the last: {self.failed_score}"
        )
        return errors + timeouts, sentence

    # --- durable state -------------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[dict[str, Any], list[bytes]]:
        """JSON-able state and payloads by reference: cheap, and unaffected by what happens to the buffer later."""
        entries = [self._entries[i] for i in sorted(self._entries)]
        state = {
            "published": self.published,
            "learner": self.learner,
            "next_step": self.next_step,
            "duplicates": self.duplicates,
            "late": self.late,
            "failed_score": self.failed_score,
            "completed_bytes": list(self._completed_bytes),
            "arrivals": asdict(self.arrivals),
            "drawn": dict(self.sampler.drawn),
            "taken": {str(s): list(ids) for s, ids in self._taken.items()},
            "pinned": {str(s): list(ids) for s, ids in self._pinned.items()},
            "ledger": self.ledger.state(),
            "groups": [e.state() for e in entries],
        }
        payloads = [s.payload for e in entries for _, s in sorted(e.samples.items()) if s.payload is not None]
        return state, payloads

    def restore(self, state: Mapping[str, Any], payloads: Sequence[bytes]) -> None:
        """Continue from a snapshot: uncommitted batches are handed out again, groups in flight await `reissue`.

        If the bound's settings changed since, groups that can no longer be trained on in time are evicted as stale.
        Raises LedgerError if the snapshot contradicts itself.
        """
        self.published, self.learner, self.next_step = state["published"], state["learner"], state["next_step"]
        self.duplicates, self.late = state["duplicates"], state["late"]
        self.failed_score = state["failed_score"]
        self._completed_bytes = (state["completed_bytes"][0], state["completed_bytes"][1])
        self.arrivals = Arrivals(**state["arrivals"])
        self.sampler.drawn.clear()
        self.sampler.drawn.update(state["drawn"])
        self.ledger = Ledger.from_state(state["ledger"])
        source = iter(payloads)
        entries = [Entry.from_state(fields, source) for fields in state["groups"]]
        self._entries = {e.group_id: e for e in entries}
        self._bytes = sum(e.size for e in entries)
        self._taken = {int(s): list(ids) for s, ids in state["taken"].items()}
        self._pinned = {int(s): list(ids) for s, ids in state["pinned"].items()}
        self._batch_metrics, self._peeks = {}, {}
        self.check()
        if self._taken:
            self.rollback(min(self._taken))
        size = self.bound.groups_per_step  # batches of another size are chosen anew
        self._pinned = {step: ids for step, ids in self._pinned.items() if len(ids) == size}
        for group_id in self.bound.excess(self._waiting(), self._horizon):
            self._evict_stale(self._entries[group_id])
