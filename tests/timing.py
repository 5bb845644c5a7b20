"""Deadlines that do not depend on the speed of the machine.

A test never measures time and never sleeps to let something happen: it waits for an event, with a
deadline that only a hang exceeds. Deadlines are given in seconds of the reference machine, quiet
(two cores of an AMD EPYC), and are scaled once a test run by a short calibration:

    from timing import deadline, wait_until

    assert done.wait(deadline(10))                    # threading.Event, queue.get, Popen.wait
    async with asyncio.timeout(deadline(10)): ...
    wait_until(lambda: file.exists(), 10, "the file") # only where there is no event to wait for

Give about ten times what the wait takes on a quiet machine. The calibration is made by the first
process of a test run; its children (workers of pytest-xdist, programs under test) inherit it in the
environment.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import psutil

T = TypeVar("T")

VARIABLE = "RLCORE_TEST_SLOWNESS"
REFERENCE_S = 0.072  # CPU seconds of `_work` on the reference machine
MOST = 100.0  # a calibration beyond it says that the machine is unusable, not slow


@dataclass(frozen=True, slots=True)
class Slowness:
    """How many times slower this machine is than the reference. Example: Slowness(1.1, 2.3)"""

    cpu: float  # by processor time: does not see other programs; may be below 1
    wall: float  # by the clock: sees them too; at least 1


def deadline(seconds: float) -> float:
    """The seconds to wait here for what the reference machine, quiet, does within `seconds`."""
    return seconds * slowness().wall


def wait_until(
    condition: Callable[[], T], seconds: float, what: str = "a condition", every_s: float = 0.02
) -> T:
    """Poll until `condition` returns something true, and return it.

    For conditions without an event: a file, a process's state. Raises AssertionError, with `what`,
    after `deadline(seconds)`.
    """
    until = time.monotonic() + deadline(seconds)
    while not (found := condition()):
        assert time.monotonic() < until, f"waited {deadline(seconds):.0f} s for {what}"
        time.sleep(every_s)
    return found


def free_port() -> int:
    """A port of loopback that is free now, below those that outgoing connections and binds to port
    0 draw from: none of them takes it before its user does."""
    for port in random.SystemRandom().sample(range(20000, 32768), 64):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def listens(port: int) -> bool:
    """Whether something on this machine accepts connections at a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for_end(
    processes: Iterable[psutil.Process], seconds: float, what: str = "processes"
) -> None:
    """Wait until none of `processes` runs. They need not be children; a zombie has ended."""
    wait_until(lambda: not any(map(_runs, processes)), seconds, f"{what} to end")


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def charge(cpu_s: float) -> None:
    """Count processor time of processes that are no children of this one, but that it uses."""
    _charges.append(cpu_s)


def charged() -> float:
    """All that was counted so far, in seconds."""
    return sum(_charges)


_charges: list[float] = []


@cache
def slowness() -> Slowness:
    """This test run's calibration, measured on the first call of its first process."""
    if VARIABLE not in os.environ:
        measured = _measured()
        os.environ[VARIABLE] = f"{measured.cpu:.3f} {measured.wall:.3f}"
    cpu, wall = map(float, os.environ[VARIABLE].split())
    return Slowness(cpu, wall)


def crowd(programs: int) -> None:
    """Give deadlines the room that `programs` test programs side by side need, each as busy as one.

    Called once, by what starts them: the calibration is made while nothing else of theirs runs.
    """
    found = slowness()
    os.environ[VARIABLE] = f"{found.cpu:.3f} {found.wall * programs:.3f}"
    slowness.cache_clear()


def _measured() -> Slowness:
    cpus, walls = [], []
    for _ in range(5):
        cpu, wall = time.process_time(), time.monotonic()
        _work()
        cpus.append((time.process_time() - cpu) / REFERENCE_S)
        walls.append((time.monotonic() - wall) / REFERENCE_S)
    # The mean over the clock: single loops may run between the turns of other programs.
    return Slowness(min(*cpus, MOST), min(max(1.0, sum(walls) / len(walls)), MOST))


def _work() -> int:
    """A fixed amount of what tests mostly do: plain Python."""
    counts: dict[int, int] = {}
    for i in range(1_000_000):
        key = (i * 2_654_435_761) & 4095
        counts[key] = counts.get(key, 0) + 1
    return len(counts)
