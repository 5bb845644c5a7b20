"""How long the engines computed, from the heartbeats of the rollout actors."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.runtime.fleet import Member


class BusyTime:
    """Seconds inside engine steps, as of each actor's newest heartbeat."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[int, float]] = {}  # name -> its process and that one's seconds so far

    def take(self, members: Sequence[Member]) -> float:
        """Seconds since the last call, mean over the training actors at work; 0 while there is none."""
        spent = [self._of(m) for m in members if m.well and m.purpose != "evaluation"]
        return sum(spent) / len(spent) if spent else 0.0

    def _of(self, member: Member) -> float:
        if not member.status:  # no heartbeat of this process yet
            return 0.0
        pid, seconds = member.status["pid"], member.status["busy_s"]
        before = self._told.get(member.name, (pid, 0.0))
        self._told[member.name] = (pid, seconds)
        return float(seconds - before[1] if before[0] == pid else seconds)
