"""The ledger and what is decided about complete groups: every admitted group departs exactly once,
consumed by a step, evicted with a reason, or failed with an error."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rlcore.buffer.specs import SelectionSpec
from rlcore.errors import UserError

RECENT = 4096  # most recent departures kept by id, for messages and audits


class LedgerError(AssertionError):
    """Accounts that do not match: a bug in rlcore, not a user error."""


@dataclass(slots=True)
class Ledger:
    """Accounts of groups by outcome. Ids are assigned in order, each at most once in a run."""

    admitted: int = 0  # also the next group id
    live: set[int] = field(default_factory=set)
    consumed: int = 0
    evicted: Counter[str] = field(default_factory=Counter)  # by reason
    failed: Counter[str] = field(default_factory=Counter)  # by reason
    score_errors: int = 0  # samples, not groups
    score_timeouts: int = 0
    # (group id, how it departed)
    recent: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def admit(self) -> int:
        """Open an account; returns the new group's id."""
        group_id = self.admitted
        self.admitted += 1
        self.live.add(group_id)
        return group_id

    def consume(self, group_id: int, step: int) -> None:
        """The group was trained on, for the last time at `step`."""
        self._leave(group_id, f"consumed by step {step}")
        self.consumed += 1

    def evict(self, group_id: int, reason: str) -> None:
        """The group was given up although it had no fault."""
        self._leave(group_id, f"evicted: {reason}")
        self.evicted[reason] += 1

    def fail(self, group_id: int, reason: str) -> None:
        """The group could not be finished."""
        self._leave(group_id, f"failed: {reason}")
        self.failed[reason] += 1

    def known(self, group_id: int) -> bool:
        """Return whether this id was ever assigned."""
        return 0 <= group_id < self.admitted

    def _leave(self, group_id: int, how: str) -> None:
        if group_id not in self.live:
            before = next(
                (text for other, text in reversed(self.recent) if other == group_id), "not live"
            )
            raise LedgerError(f"group {group_id} cannot leave as '{how}': {before}")
        self.live.remove(group_id)
        self.recent.append((group_id, how))

    def check(self) -> None:
        """Raises LedgerError unless admitted = consumed + live + evicted + failed."""
        evicted, failed = sum(self.evicted.values()), sum(self.failed.values())
        if self.admitted != self.consumed + len(self.live) + evicted + failed:
            raise LedgerError(
                f"ledger: {self.admitted} admitted, but {self.consumed} consumed + "
                f"{len(self.live)} live + {evicted} evicted + {failed} failed"
            )

    def metrics(self) -> dict[str, float]:
        """Counts since the start of the run, under the names of the outside contract."""
        named = {f"ledger/evicted/{reason}": float(n) for reason, n in sorted(self.evicted.items())}
        named |= {f"ledger/failed/{reason}": float(n) for reason, n in sorted(self.failed.items())}
        return named | {
            "ledger/admitted": float(self.admitted),
            "ledger/consumed": float(self.consumed),
            "ledger/live": float(len(self.live)),
            "ledger/evicted": float(sum(self.evicted.values())),
            "ledger/failed": float(sum(self.failed.values())),
            "ledger/score_errors": float(self.score_errors),
            "ledger/score_timeouts": float(self.score_timeouts),
        }

    def state(self) -> dict[str, Any]:
        """JSON-able state."""
        return {
            "admitted": self.admitted,
            "live": sorted(self.live),
            "consumed": self.consumed,
            "evicted": dict(self.evicted),
            "failed": dict(self.failed),
            "score_errors": self.score_errors,
            "score_timeouts": self.score_timeouts,
            "recent": [list(entry) for entry in self.recent],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Ledger:
        """The inverse of `state`. Raises LedgerError if the sums of the state do not match."""
        ledger = cls(
            admitted=state["admitted"],
            live=set(state["live"]),
            consumed=state["consumed"],
            evicted=Counter(state["evicted"]),
            failed=Counter(state["failed"]),
            score_errors=state["score_errors"],
            score_timeouts=state["score_timeouts"],
            recent=deque(((int(g), str(how)) for g, how in state["recent"]), maxlen=RECENT),
        )
        ledger.check()
        return ledger


FILTERED_EQUAL = "filtered_equal_rewards"
TOO_FEW = "too_few_samples"
LEAST_SAMPLES = 2  # with fewer usable samples, a group of two or more has nothing to compare


def all_equal(rewards: Sequence[float]) -> bool:
    """Such a group has no advantage to learn from (dynamic sampling; DAPO, arXiv:2503.14476, eq.
    11): rewards that differ by the rounding of a sum alone have none either."""
    return math.isclose(min(rewards), max(rewards), rel_tol=1e-12)


def highest(rewards: Sequence[float], count: int) -> list[int]:
    """Indices of the `count` highest rewards, ascending; ties go to the earlier sample."""
    best = sorted(range(len(rewards)), key=lambda i: (-rewards[i], i))[:count]
    return sorted(best)


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """Either `kept` (positions in the rewards given), or the reason why the group leaves."""

    kept: tuple[int, ...] = ()
    failed: str = ""
    evicted: str = ""


def judge(rewards: Sequence[float], spec: SelectionSpec, samples_per_group: int) -> GroupVerdict:
    """Decide what happens to a complete group. `rewards` of the usable samples (score ok), by
    sample_index."""
    if len(rewards) < min(LEAST_SAMPLES, samples_per_group):
        return GroupVerdict(failed=TOO_FEW)
    here = spec.train_on_best is not None and spec.kept_by_learner is None
    kept = highest(rewards, spec.train_on_best if here and spec.train_on_best else len(rewards))
    # Judged over what would be trained on: the best of a mixed group are often all equal.
    if spec.dynamic_sampling and all_equal([rewards[i] for i in kept]):
        return GroupVerdict(evicted=FILTERED_EQUAL)
    return GroupVerdict(kept=tuple(kept))


@dataclass(slots=True)
class TaskAccount:
    """Groups of one task since the start of the run."""

    consumed: int = 0
    filtered: int = 0  # by dynamic sampling
    dropped: int = 0  # failed, or evicted for another reason
    filtered_in_a_row: int = 0
    last_reward: float = 0.0  # that the samples of the newest filtered group agreed on


class TaskAccounts:
    """The accounts of all tasks, by the first part of their prompt ids."""

    def __init__(self) -> None:
        self.tasks: dict[str, TaskAccount] = {}

    def of(self, task: str) -> TaskAccount:
        """The counts of a task."""
        return self.tasks.setdefault(task, TaskAccount())

    def departed(self, task: str, reason: str | None) -> None:
        """Count a group that left: trained on (None), or for a reason."""
        account = self.of(task)
        account.consumed += reason is None
        account.filtered += reason == FILTERED_EQUAL
        account.dropped += reason not in (None, FILTERED_EQUAL)

    def judged(self, task: str, *, filtered: bool, reward: float) -> None:
        """Note whether a complete group was filtered. `reward`: of one of its samples."""
        account = self.of(task)
        account.filtered_in_a_row = account.filtered_in_a_row + 1 if filtered else 0
        if filtered:
            account.last_reward = reward

    def check(self, limit: int) -> None:
        """Raise UserError for a task of which the last `limit` groups were all filtered."""
        for task, account in self.tasks.items():
            if account.filtered_in_a_row >= limit:
                raise UserError(
                    f"algorithm.dynamic_sampling=true has filtered the last "
                    f"{account.filtered_in_a_row} groups of task {task}, since all samples of each "
                    f"had equal rewards (the newest: {account.last_reward:g}), so that nothing of "
                    "it is trained on: make its problems easier or harder, sample more of each "
                    f"prompt, leave the task out, or raise algorithm.filter_limit={limit}."
                )

    def metrics(self) -> dict[str, float]:
        """`task/<task>/<count>` of every task that has had a group."""
        return {
            f"task/{task}/{name}": float(getattr(account, name))
            for task, account in sorted(self.tasks.items())
            for name in ("consumed", "filtered", "dropped")
        }

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {task: asdict(account) for task, account in self.tasks.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self.tasks = {task: TaskAccount(**fields) for task, fields in state.items()}
