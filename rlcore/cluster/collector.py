"""Python's garbage collector in the processes that all samples of a run pass.

Its full passes look at every object of a process, which stands still meanwhile: 0.3 to 0.4 s in the
buffer of 4,096 actors. They find nothing there. What buffer and controller drop is in no cycles and
leaves by its reference count (`tests/cluster/test_collector.py` holds that); passes over young
objects stay on, for the cycles of errors that were caught. Figures and commands:
benchmarks/results/control_plane_cpu.md.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

YOUNG = 10_000  # new objects until a pass over them
YOUNG_PASSES = 5  # until one over all that came since the last of its kind
NEVER = 2**31 - 1  # passes of that kind until one over all objects


def keep_passes_short() -> None:
    """Make one full pass now, where a process may pause, and none from then on; what is there
    already is in no later pass. To be called again when the process has changed."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, YOUNG_PASSES, NEVER)


@contextlib.contextmanager
def short_passes() -> Iterator[None]:
    """`keep_passes_short` while it is open: for a process that goes on with something else."""
    before = gc.get_threshold()
    keep_passes_short()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
