"""Counters of a rollout worker."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Written only by the engine thread, read by any thread. Seconds and counts since the start."""

    steps: int = 0
    tokens: int = 0
    submitted: int = 0
    finished: int = 0
    running: int = 0
    waiting: int = 0
    version: int = 0
    updates: int = 0
    busy_s: float = 0.0  # inside engine steps
    update_stop_s: float = 0.0  # stopped for loading and verifying weights
    drain_s: float = 0.0  # draining before an update: old requests still decode, new ones wait
    # request id -> seconds it has decoded, of those that have a token; replaced, never changed
    decoding_s: dict[str, float] = field(default_factory=dict)
    # monotonic times: last turn of the thread, idle ones included, and last engine step
    heartbeat: float = field(default_factory=time.monotonic)
    last_step: float = field(default_factory=time.monotonic)
    loading_until: float = 0.0  # deadline of the weights being loaded; 0: none are

    def heartbeat_age_s(self) -> float:
        """Seconds since the thread last turned; while it loads weights, since their deadline.

        A large set takes longer than a process may be silent, and has a deadline of its own.
        """
        return max(0.0, time.monotonic() - max(self.heartbeat, self.loading_until))
