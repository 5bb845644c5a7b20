"""Progress of a command that takes long, on standard error. It is a line that updates in place in a
terminal, else a line every ten seconds, so that short commands and logs stay as they were."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

EVERY_S = 10.0  # between two lines where standard error is no terminal
SHOWN_S = 0.5  # between two states of a terminal's line


class ProgressLine:
    """How far a piece of work is. Example: ProgressLine("eval", "answers").show(12, 64)

    `unit`: "MB" shows bytes in megabytes. Threads may share one.
    """

    def __init__(self, name: str, unit: str, out: TextIO | None = None) -> None:
        self._name = name
        self._unit = unit
        self._out = sys.stderr if out is None else out
        self._live = self._out.isatty()
        self._began = time.monotonic()
        self._next = self._began + (0.0 if self._live else EVERY_S)
        self._width = 0  # of the terminal's line
        self._over = False
        self._lock = threading.Lock()

    def show(self, done: float, total: float | None) -> None:
        """Print where the work is, if the last time was long enough ago."""
        with self._lock:
            now = time.monotonic()
            if self._over or now < self._next:
                return
            self._next = now + (SHOWN_S if self._live else EVERY_S)
            self._write(self._line(done, total, now - self._began))

    def stage(self, text: str) -> None:
        """Print what the work is at, where its size is not known."""
        with self._lock:
            now = time.monotonic()
            if self._live or now >= self._next:
                self._next = now + (SHOWN_S if self._live else EVERY_S)
                self._write(f"rlcore {self._name}: {text}, {now - self._began:.0f} s")

    def close(self) -> None:
        """Remove the terminal's line; nothing is printed any more."""
        with self._lock:
            self._over = True
            if self._live and self._width:
                self._out.write("\r" + " " * self._width + "\r")
                self._out.flush()
                self._width = 0

    def _line(self, done: float, total: float | None, seconds: float) -> str:
        size = 1e6 if self._unit == "MB" else 1
        of = f" of {total / size:,.0f}" if total else ""
        line = f"rlcore {self._name}: {done / size:,.0f}{of} {self._unit}, {seconds:.0f} s"
        if total and 0 < done < total:
            line += f", {seconds * (total - done) / done:.0f} s remain"
        return line

    def _write(self, line: str) -> None:
        text = f"{line}\n"
        if self._live:
            text = "\r" + line.ljust(self._width)
            self._width = len(line)
        self._out.write(text)
        self._out.flush()


@contextmanager
def waiting(name: str, text: str, out: TextIO | None = None) -> Iterator[Callable[[str], None]]:
    """Show how long a stage takes while the block runs; the value names the next stage."""
    progress, stop, current = ProgressLine(name, "s", out), threading.Event(), [text]

    def watch() -> None:
        while not stop.wait(SHOWN_S):
            progress.stage(current[0])

    thread = threading.Thread(target=watch, name="rlcore-progress", daemon=True)
    thread.start()
    try:
        yield lambda text: current.__setitem__(0, text)
    finally:
        stop.set()
        thread.join()
        progress.close()
