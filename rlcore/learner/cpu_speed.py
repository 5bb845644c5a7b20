"""Compute threads of a rank on CPU that follow the machine's load."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STAT = Path("/proc/stat")
WINDOW_S = 0.04  # four ticks of the clock that /proc/stat counts in
FREE = 0.7  # of a core: what must have been free for one more thread


# Compute threads of a rank on CPU that follow the machine's load.
#
# In an asynchronous run, engines that wait for the learner leave their cores idle. A rank can use
# these, and has to give them back within a fraction of a step. The number of threads changes how
# sums round, so this is only for runs whose results depend on timing anyway.


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time of this machine and process, since some moment of the past.

    Example: Usage(at_s=12.0, own_s=3.5, idle_s=7.0)
    """

    at_s: float
    own_s: float  # processor seconds of this process, over all of its threads
    idle_s: float  # seconds that cores of this process idled, added up


def usage(cores: Collection[int], path: Path = STAT) -> Usage:
    """The present usage, by the times that Linux counts for each core."""
    names = {f"cpu{core}" for core in cores}
    lines = [line.split() for line in path.read_text().splitlines()]
    ticks = sum(int(words[4]) for words in lines if words and words[0] in names)
    return Usage(time.monotonic(), time.process_time(), ticks / os.sysconf("SC_CLK_TCK"))


def threads_for(before: Usage, now: Usage, *, fewest: int, most: int) -> int:
    """Threads for as many cores as this process used between the two moments, plus the idle ones.

    Example: with one core used and 0.8 of another idle it is 2."""
    free = now.own_s - before.own_s + now.idle_s - before.idle_s
    free /= now.at_s - before.at_s
    return max(fewest, min(most, int(free + 1.0 - FREE)))


class SpareCores:
    """Sets the number of torch's threads while a model computes."""

    def __init__(
        self,
        fewest: int,
        most: int,
        *,
        read: Callable[[], Usage] | None = None,
        set_threads: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        """`read`: the usage of the cores that this process may run on, which also bound `most`."""
        cores = os.sched_getaffinity(0)
        self._fewest, self._most = fewest, max(fewest, min(most, len(cores)))
        self._read = read or (lambda: usage(cores))
        self._set_threads = set_threads
        self._threads = fewest
        self._before = self._read()

    def follow(self, *_: Any) -> None:
        """Measure the load again and set the threads, unless that was a moment ago. A hook of
        modules and of gradients."""
        if time.monotonic() - self._before.at_s < WINDOW_S:
            return
        now = self._read()
        threads = threads_for(self._before, now, fewest=self._fewest, most=self._most)
        self._before = now
        if threads != self._threads:
            self._threads = threads
            self._set_threads(threads)

    def attach(self, lm: nn.Module) -> None:
        """Measure the load before each layer of a causal LM, forward and backward."""

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            states = output if isinstance(output, Tensor) else output[0]
            if states.requires_grad:
                states.register_hook(self.follow)

        # the first list of modules, whatever its name
        modules = lm.base_model.modules()  # type: ignore[union-attr]
        for layer in next(m for m in modules if isinstance(m, nn.ModuleList)):
            layer.register_forward_pre_hook(self.follow)
            layer.register_forward_hook(after)
