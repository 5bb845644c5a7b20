"""A circuit breaker: a service that fails again and again is left alone for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class CircuitOpen(Exception):
    """The service is left alone; the message says why and for how long."""


class Breaker:
    """Closed, it lets every request pass. After `failures` failed ones in a row it opens: requests
    fail at once. `rest_s` later one request is tried while the others wait for its outcome, which
    closes the breaker or opens it again.

    Used by the tasks of one event loop. note: called with a sentence when it opens and closes.
    """

    def __init__(
        self,
        name: str,
        *,
        failures: int,
        rest_s: float,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._failures = failures
        self._rest_s = rest_s
        self._note = note
        self._clock = clock
        self._in_a_row = 0
        self._last = ""
        self._opened_at: float | None = None
        self._reopens_at = 0.0
        self._trial_over: asyncio.Event | None = None  # set when the request that is tried is over

    @property
    def open(self) -> bool:
        return self._opened_at is not None

    async def admit(self) -> None:
        """Return if a request may be made; `succeeded`, `failed` or `withdrawn` must follow. Raises
        CircuitOpen."""
        while self.open:
            if self._clock() < self._reopens_at:
                raise CircuitOpen(
                    f"the circuit breaker is open after {self._in_a_row} failed requests in a row, "
                    f"the last: {self._last}"
                )
            if self._trial_over is None:
                self._trial_over = asyncio.Event()
                return
            # The request that is tried has a deadline.
            await self._trial_over.wait()

    def succeeded(self) -> None:
        if self._opened_at is not None:
            away = self._clock() - self._opened_at
            self._note(f"{self._name} answers again, {away:.0f} s after its circuit breaker opened")
        self._opened_at = None
        self._in_a_row = 0
        self._end_trial()

    def failed(self, why: str) -> None:
        """A request failed with all its retries. Those that were under way as the breaker opened
        count, and change nothing else."""
        self._in_a_row += 1
        self._last = why
        if self._opened_at is None and self._in_a_row >= self._failures:
            self._opened_at = self._clock()
            self._reopens_at = self._opened_at + self._rest_s
            self._note(
                f"the circuit breaker of {self._name} is open: {self._in_a_row} requests in a row "
                f"failed, the last: {why}; its samples fail at once, and every {self._rest_s:g} s "
                "one request is tried"
            )
        elif self._trial_over is not None:
            self._reopens_at = self._clock() + self._rest_s
        self._end_trial()

    def withdrawn(self) -> None:
        """The request was cancelled: nothing is known."""
        self._end_trial()

    def _end_trial(self) -> None:
        if self._trial_over is not None:
            self._trial_over.set()
            self._trial_over = None
