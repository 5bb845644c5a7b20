"""Python's garbage collector in the processes of a run."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

YOUNG = 10_000  # new objects until a pass over them
YOUNG_PASSES = 5  # until one over all that came since the last of its kind
NEVER = 2**31 - 1  # passes of that kind until one over all objects


# Python's garbage collector in the processes that all samples of a run pass.
#
# Its full passes visit every object of a process, which stops meanwhile: 0.3 to 0.4 s in
# the buffer of 4,096 actors. They find nothing there: objects that buffer and controller drop are
# in no cycles and are freed by their reference counts (`tests/cluster/test_collector.py` holds
# that); passes over young objects stay on, for the cycles of errors that were caught. Figures and
# commands: benchmarks/results/control_plane_cpu.md.


def keep_passes_short() -> None:
    """Make one full pass now, where a process may pause, and no full pass later; later passes leave
    present objects out. Call it again when the process has changed."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, YOUNG_PASSES, NEVER)


@contextlib.contextmanager
def short_passes() -> Iterator[None]:
    """A context in which `keep_passes_short` is in force, for a process that goes on with other
    work."""
    before = gc.get_threshold()
    keep_passes_short()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
