"""Compute threads of a process on CPU that follow the machine's load.

In an asynchronous run, engines ahead of the learner leave their cores idle. A rank can use
these, and has to give them back within a fraction of a step. A rank that itself waits for data
takes none: it would only slow the engines that it waits for. The number of threads changes how sums
round, so this is only for runs whose results depend on timing anyway.
"""

from __future__ import annotations

import fcntl
import math
import os
import struct
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.cores import Quota, cores, quota
from rlcore.errors import UserError
from rlcore.lazy import torch

if TYPE_CHECKING:
    from torch import nn

STAT = Path("/proc/stat")
WINDOW_S = 0.04  # four ticks of the clock that /proc/stat counts in
FREE = 0.7  # of a core: what must have been free for one more thread
WAITS = 0.1  # share of its time for which a process waits, from which on it needs no more cores
MEMORY_S = 20.0  # of that share: a few steps


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time of this machine and process, since some moment of the past.

    Example: Usage(at_s=12.0, own_s=3.5, idle_s=7.0)
    """

    at_s: float
    own_s: float  # processor seconds of this process, over all of its threads
    idle_s: float  # seconds that cores of this process idled, added up
    unused_s: float | None = None  # seconds of its quota that were not used; None: it has none


def usage(among: Collection[int], limit: Quota | None = None, path: Path = STAT) -> Usage:
    """The present usage of these cores, by the times that Linux counts for each core."""
    names = {f"cpu{core}" for core in among}
    lines = [line.split() for line in path.read_text().splitlines()]
    ticks = sum(int(words[4]) for words in lines if words and words[0] in names)
    now = time.monotonic()
    unused = None if limit is None else limit.cores * now - limit.used_s()
    return Usage(now, time.process_time(), ticks / os.sysconf("SC_CLK_TCK"), unused)


def threads_for(before: Usage, now: Usage, *, fewest: int, most: int) -> int:
    """Threads for as many cores as this process used between the two moments, plus the idle ones.

    Example: with one core used and 0.8 of another idle it is 2."""
    idle = now.idle_s - before.idle_s
    if now.unused_s is not None and before.unused_s is not None:
        idle = min(idle, now.unused_s - before.unused_s)
    free = (now.own_s - before.own_s + idle) / (now.at_s - before.at_s)
    return max(fewest, min(most, int(free + 1.0 - FREE)))


@dataclass(slots=True)
class Waiting:
    """The share of time for which a process computed nothing, over the last `MEMORY_S` or so."""

    share: float = 0.0
    _known_s: float = 0.0

    def add(self, before: Usage, now: Usage) -> None:
        """Count the time between two moments."""
        passed = now.at_s - before.at_s
        idle = max(0.0, passed - (now.own_s - before.own_s))
        kept = self._known_s * math.exp(-passed / MEMORY_S)
        self._known_s = kept + passed
        self.share = (self.share * kept + idle) / self._known_s


class Claims:
    """The moment at which a process of this user last took idle cores.

    Two processes that saw the same core idle would both take it, find each other there, both give
    it back, and so on. So one that would take more looks first whether another has since the
    measurement began; that core is in use in the next one.
    """

    def __init__(self, path: Path | None = None) -> None:
        """`path`: of a file that all processes of the machine share."""
        path = path or Path(tempfile.gettempdir()) / f"rlcore-spare-cores-{os.getuid()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(path, flags, 0o600)

    def claim(self, since: float) -> bool:
        """Return whether no process has claimed since that monotonic time, and claim if so. Never
        waits."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another one claims
            return False
        try:
            stored, now = os.pread(self._file, 8, 0), time.monotonic()
            last = struct.unpack("d", stored)[0] if len(stored) == 8 else 0.0
            if since < last <= now:  # a later moment is of another boot
                return False
            os.pwrite(self._file, struct.pack("d", now), 0)
            return True
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


class SpareCores:
    """Sets the number of torch's threads while a model computes."""

    def __init__(
        self,
        fewest: int,
        most: int,
        *,
        read: Callable[[], Usage] | None = None,
        claims: Claims | None = None,
    ) -> None:
        """`most`: where this process may use as many cores. `read`: the usage of these cores.
        Raises UserError on a system that does not count idle time."""
        if not STAT.exists():
            raise UserError(
                "learner.max_threads needs Linux, which counts how long each core idles: use "
                "learner.max_threads=null."
            )
        among, limit = os.sched_getaffinity(0), quota()
        self._fewest, self._most = fewest, max(fewest, min(most, cores()))
        self._read = read or (lambda: usage(among, limit))
        self._claims = claims or Claims()
        self._before = self._read()
        self._waiting = Waiting()

    def follow(self, *_: Any) -> None:
        """Measure the load again and set the threads, unless that was a moment ago. A hook of
        modules and of gradients."""
        if time.monotonic() - self._before.at_s < WINDOW_S:
            return
        now, before = self._read(), self._before
        self._before = now
        self._waiting.add(before, now)
        threads = self._fewest
        if self._waiting.share < WAITS:
            threads = threads_for(before, now, fewest=self._fewest, most=self._most)
        # asked of torch: an engine sets the fewest at the end of its backward passes
        present = torch.get_num_threads()
        if threads < present or (threads > present and self._claims.claim(before.at_s)):
            torch.set_num_threads(threads)

    def attach(self, lm: nn.Module) -> None:
        """Measure the load before each layer of a causal LM, forward and backward."""

        def after(_module: Any, _args: Any, output: Any) -> None:
            states = output if isinstance(output, torch.Tensor) else output[0]
            if states.requires_grad:
                states.register_hook(self.follow)

        # the first list of modules, whatever its name
        modules = lm.base_model.modules()  # type: ignore[union-attr]
        for layer in next(m for m in modules if isinstance(m, torch.nn.ModuleList)):
            layer.register_forward_pre_hook(self.follow)
            layer.register_forward_hook(after)
