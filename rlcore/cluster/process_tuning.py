"""Settings that make a run's processes faster: Python's garbage collector, and the variables of
the CPU libraries."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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


CPU_INFO = Path("/proc/cpuinfo")
KERNELS = "MKL_ENABLE_INSTRUCTIONS"


@dataclass(frozen=True, slots=True)
class Processor:
    """Example: Processor("AuthenticAMD", frozenset({"avx2", "avx512f"}))"""

    vendor: str  # "" where it is not known
    features: frozenset[str]

    @classmethod
    def here(cls, path: Path = CPU_INFO) -> Processor:
        """This machine's, as Linux describes its first core."""
        try:
            lines = path.read_text().splitlines()
        except OSError:
            return cls("", frozenset())
        first: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            first.setdefault(name.strip(), value.strip())
        return cls(first.get("vendor_id", ""), frozenset(first.get("flags", "").split()))


def wanted(processor: Processor) -> dict[str, str]:
    """Variables that a run's processes are started with, unless they are set already.

    MKL takes its AVX2 kernels on processors of AMD that have AVX-512 (benchmarks/results/
    kernels_cpu.md); on Intel's its own choice is the widest.
    """
    if processor.vendor == "AuthenticAMD" and "avx512f" in processor.features:
        return {KERNELS: "AVX512"}
    return {}


def described(processor: Processor, environment: Mapping[str, str]) -> str:
    """Return the text of `rlcore doctor` on the kernels that will be used, and on who chose
    them."""
    widest = next(
        (f for f in ("avx512f", "avx2") if f in processor.features), "neither AVX2 nor AVX-512"
    )
    name = f"{processor.vendor or 'unknown vendor'}, {widest}"
    if KERNELS in environment:
        return f"{name}: {KERNELS}={environment[KERNELS]}, as the environment has it"
    chosen = wanted(processor).get(KERNELS)
    if chosen is None:
        return f"{name}: MKL's own choice"
    return f"{name}: a run sets {KERNELS}={chosen} (a joined cluster's nodes must set it)"
