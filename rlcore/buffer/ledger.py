"""The ledger: every admitted group departs exactly once, consumed by a step, evicted with a reason,
or failed."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

RECENT = 4096  # most recent departures kept by id, for messages and audits


class LedgerError(AssertionError):
    """The accounts do not match: a bug in rlcore, not a user error."""


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
        """Whether this id was ever assigned."""
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
