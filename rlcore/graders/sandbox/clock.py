"""The time of programs that the server watches, without that in which they had no CPU."""

from __future__ import annotations

import contextlib
import mmap
import struct
import time

PROCESS_CLOCK = 2  # of another process: what its threads and it have used of the CPUs


class Tally:
    """The facts that the server needs of a runner's children to charge for them: the one that runs,
    and the seconds of ended ones. They are in memory that runner and server share alone."""

    SIZE = 32
    FORM = struct.Struct("=qdd")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self.SIZE)

    def write(self, child: int, cpu_s: float, delay_s: float) -> None:
        """child: 0 if none runs. delay_s: ready, without a CPU."""
        self.FORM.pack_into(self._memory, 0, child, cpu_s, delay_s)

    def read(self) -> tuple[int, float, float]:
        return self.FORM.unpack_from(self._memory, 0)

    def mark(self) -> None:
        """Say that a child is confined."""
        self._memory[self.FORM.size] = 1

    def marked(self) -> bool:
        """Return whether one has said so, and forget it."""
        found = self._memory[self.FORM.size] == 1
        self._memory[self.FORM.size] = 0
        return found

    def close(self) -> None:
        self._memory.close()


def delay(pid: int) -> float:
    """Seconds that the main thread of a process was ready and waited for a CPU; 0 where the kernel
    does not count them."""
    try:
        with open(f"/proc/{pid}/schedstat") as counts:
            return int(counts.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


class Clock:
    """The time of one program. tally: of the runner `pid`, if the program has its own processes."""

    def __init__(self, pid: int, judge: int, tally: Tally | None = None) -> None:
        self._pid = pid
        self._judge = judge
        self._tally = tally
        self._began = time.monotonic()
        self._delay_before = delay(judge)

    def wall(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._began

    def running(self) -> int:
        """The number of the process that runs the program now."""
        child = self._tally.read()[0] if self._tally else 0
        return child or self._pid

    def charged(self) -> float:
        """Seconds that count. Only a main thread's wait for a CPU is taken off: it may wait for
        other threads of the program, whose CPU seconds count."""
        child, cpu_s, waited = self._tally.read() if self._tally else (0, 0.0, 0.0)
        for pid in filter(None, (self._pid, child)):
            with contextlib.suppress(OSError):  # it has ended
                cpu_s += time.clock_gettime((~pid << 3) | PROCESS_CLOCK)
            waited += delay(pid)
        waited += delay(self._judge) - self._delay_before
        return max(cpu_s, self.wall() - waited)
