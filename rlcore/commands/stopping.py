"""Signals that end a run: SIGINT (Ctrl-C) and SIGTERM.

Supervisors often signal a process twice at once: coreutils' timeout its child and then the group,
Slurm each step and the batch script, a terminal with a bouncing key. Signals within a few seconds
of the first are therefore one request; only a later one stops at once.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable

from rlcore.loop.controller import Controller

TOGETHER_S = 5.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """What the signals of one command have asked for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: float | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal has asked the run to end."""
        return self._first is not None

    def repeated(self) -> bool:
        """Note a signal. Whether it is one with the first, which is already acted on."""
        now = self._clock()
        if self._first is None:
            self._first = now
            return False
        return now - self._first < TOGETHER_S

    def interrupt(self) -> None:
        """Have both signals raise KeyboardInterrupt.

        For the time outside the loop, while processes start or end: they are taken down, exit code
        130. A repeated signal must not interrupt that. Only in the main thread, elsewhere nothing.
        """

        def raise_once(number: int, frame: object) -> None:
            if not self.repeated():
                raise KeyboardInterrupt

        # Tests and embedding programs may run a command in another thread, which gets no signals.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, raise_once)

    def listen(self, controller: Controller, note: Callable[[str], None]) -> None:
        """While the running event loop lasts, the first signal ends the run after the current step
        with a checkpoint, and a later one at once, by cancelling the current task."""
        loop = asyncio.get_running_loop()
        main = asyncio.current_task()
        assert main is not None

        def stop(name: str) -> None:
            if self.requested:
                if not self.repeated():
                    main.cancel()
                return
            self.repeated()
            note(
                f"{name}: finishing the current step, then a checkpoint (press again later to stop "
                "now)"
            )
            controller.request_stop()

        for number in SIGNALS:
            loop.add_signal_handler(number, stop, number.name)
