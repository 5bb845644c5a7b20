"""The matrix kernels of a run's processes on CPU: MKL's instruction set, chosen by trying.

Which set MKL takes by itself, whether the variable changes that and whether it pays depend on the
processor and on the build (benchmarks/results/kernels_cpu.md). MKL reads its variable once a
process, so each set is tried in a separate one, for 50 ms, by products of the run's shapes. The
result is kept for later runs of the same processor and shapes, so that it does not change with the
noise of a machine. Products of other kernels round otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

CPU_INFO = Path("/proc/cpuinfo")
KERNELS = "MKL_ENABLE_INSTRUCTIONS"
OWN = ""  # MKL's own choice: the variable is not set
# by the flag of the processor that it needs; others would be refused or end the process
SETS = {"AVX512": "avx512f", "AVX2": "avx2"}
FASTER = 1.15  # than MKL's own choice, at least: a busy machine moves a speed by a tenth
TRIAL_S = 0.05
TRIAL_LIMIT_S = 60.0  # for one process, on a busy machine
ROWS = 128  # of the products that are tried
MOST_SHAPES = 4
MOST_COLUMNS = 4096

Shape = tuple[int, int]  # a weight's: outputs, inputs
Source = Literal["environment", "run", "kept", "tried", "unknown"]


@dataclass(frozen=True, slots=True)
class Processor:
    """Example: Processor("AuthenticAMD", frozenset({"avx2", "avx512f"}), "AMD EPYC 9354")"""

    vendor: str  # "" where it is not known
    features: frozenset[str]
    model: str = ""

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
        flags = frozenset(first.get("flags", "").split())
        # families and models tell apart what hypervisors give one name
        kind = ("model name", "cpu family", "model", "stepping")
        return cls(first.get("vendor_id", ""), flags, "/".join(first.get(k, "") for k in kind))

    @property
    def candidates(self) -> tuple[str, ...]:
        """The values of the variable that this processor can run, MKL's own choice first."""
        return (OWN, *(name for name, flag in SETS.items() if flag in self.features))


@dataclass(frozen=True, slots=True)
class Kernels:
    """The choice of a run. Example: Kernels("AVX512", "tried", {"": 71.0, "AVX512": 97.0})"""

    chosen: str
    source: Source
    gflops: Mapping[str, float] = field(default_factory=dict)  # of one thread, by candidate

    @property
    def speed(self) -> float | None:
        """GFLOP/s of one thread with the chosen kernels, where that was tried."""
        return self.gflops.get(self.chosen)

    def set_in(self, environment: dict[str, str] | os._Environ[str]) -> None:
        """Set the variable for processes that will be started, unless it is set."""
        if self.chosen != OWN:
            environment.setdefault(KERNELS, self.chosen)

    @contextlib.contextmanager
    def set_here(self) -> Iterator[None]:
        """A context in which processes that this one starts have the variable."""
        before = os.environ.get(KERNELS)
        self.set_in(os.environ)
        try:
            yield
        finally:
            if before is None:  # a later run in this process makes its own choice
                os.environ.pop(KERNELS, None)

    def __str__(self) -> str:
        what = f"{KERNELS}={self.chosen}" if self.chosen else "MKL's own choice"
        why = {
            "environment": "as the environment has it",
            "run": "as the run began",
            "kept": "by an earlier trial",
            "tried": "by a trial",
            "unknown": "nothing was tried",
        }[self.source]
        if len(self.gflops) > 1:
            rates = (f"{name or 'own choice'} {rate:.0f}" for name, rate in self.gflops.items())
            why += f" (GFLOP/s of a thread: {', '.join(rates)})"
        return f"{what}, {why}"


def choose(gflops: Mapping[str, float]) -> str:
    """The fastest candidate by these speeds, MKL's own choice unless another is clearly faster.

    Example: choose({"": 71.0, "AVX512": 97.0, "AVX2": 72.0}) is "AVX512"."""
    best = max(gflops, key=lambda name: gflops[name], default=OWN)
    return best if gflops.get(best, 0.0) > FASTER * gflops.get(OWN, 0.0) else OWN


def common_shapes(weights: Iterable[Sequence[int]]) -> tuple[Shape, ...]:
    """The shapes of a model's matrices that take most of its operations; a wide one, such as a
    head's, up to a number of columns."""
    work: dict[Shape, int] = {}
    for shape in weights:
        if len(shape) == 2 and min(shape) > 1:
            outputs, inputs = shape
            cut = min(outputs, MOST_COLUMNS), min(inputs, MOST_COLUMNS)
            work[cut] = work.get(cut, 0) + outputs * inputs
    return tuple(sorted(sorted(work, key=lambda s: -work[s])[:MOST_SHAPES]))


def kernels_for(
    shapes: Sequence[Shape],
    kept: Path,
    *,
    run: str | None = None,
    environment: Mapping[str, str] = os.environ,
    processor: Processor | None = None,
    speed: Callable[[str, Sequence[Shape]], float | None] | None = None,
) -> Kernels:
    """The kernels of a run whose model has matrices of these shapes.

    `kept`: a file of earlier results, to which a new one is added. `run`: what the run began with
    (OWN: MKL's own choice), where this machine has it; None: it begins. The environment's own
    choice comes before all. `speed`: of one candidate, `tried_speed`.
    """
    processor = processor or Processor.here()
    found = _read(kept).get(key := _key(processor, shapes), {})
    if KERNELS in environment:
        return Kernels(environment[KERNELS], "environment", found)
    if run is not None and run in processor.candidates:
        return Kernels(run, "run", found)
    if found:
        return Kernels(choose(found), "kept", found)
    if len(processor.candidates) == 1 or not shapes:
        return Kernels(OWN, "unknown")
    rates = {name: (speed or tried_speed)(name, shapes) for name in processor.candidates}
    gflops = {name: rate for name, rate in rates.items() if rate is not None}
    if OWN not in gflops:  # no MKL here
        return Kernels(OWN, "unknown")
    _keep(kept, key, gflops)
    return Kernels(choose(gflops), "tried", gflops)


def _key(processor: Processor, shapes: Sequence[Shape]) -> str:
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    sets = sorted(flag for flag in SETS.values() if flag in processor.features)
    told = json.dumps([processor.vendor, processor.model, sets, torch, list(shapes)])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _read(kept: Path) -> dict[str, dict[str, float]]:
    """Earlier results; none where the file is absent or was written by something else."""
    try:
        found = json.loads(kept.read_text())
        return {key: {str(n): float(v) for n, v in of.items()} for key, of in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _keep(kept: Path, key: str, gflops: Mapping[str, float]) -> None:
    # another run's result of the same moment may be lost, which costs a trial
    from rlcore.files import replace_file

    with contextlib.suppress(OSError):  # a folder that cannot be written: tried again next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_read(kept) | {key: dict(gflops)}, indent=1)
        replace_file(kept, text + "\n")


# -- a trial, in a process of its own --------------------------------------------------------------


def tried_speed(candidate: str, shapes: Sequence[Shape]) -> float | None:
    """GFLOP/s of one thread with these kernels, the geometric mean over the shapes; None where they
    cannot be had here. Starts a process, which imports nothing but this file."""
    environment = {n: v for n, v in os.environ.items() if n != KERNELS}
    environment |= {"OMP_NUM_THREADS": "1"} | ({KERNELS: candidate} if candidate else {})
    words = [sys.executable, "-P", __file__, json.dumps(shapes)]
    try:
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=TRIAL_LIMIT_S
        )
        return float(done.stdout) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError, OSError):
        return None


def _library() -> Any:
    """The library of torch that has MKL inside, without an import of torch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "lib"
    for first in sorted(folder.glob("libgomp*")):
        ctypes.CDLL(str(first), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(folder / "libc10.so"), ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(folder / "libtorch_cpu.so"))
    library.MKL_Get_Version_String  # noqa: B018  AttributeError: another library's products
    return library


def _measure(shapes: Sequence[Shape]) -> float:
    """GFLOP/s, by processor time of the fastest product of each shape: other work on the machine
    counts less."""
    sgemm, rates = _library().sgemm_, []
    for outputs, inputs in shapes:
        sizes = [ctypes.byref(ctypes.c_int(n)) for n in (outputs, ROWS, inputs)]
        m, n, k = sizes
        one, zero = (ctypes.byref(ctypes.c_float(x)) for x in (1.0, 0.0))
        a, b, c = (
            (ctypes.c_float * size)() for size in (outputs * inputs, inputs * ROWS, outputs * ROWS)
        )
        for matrix in (a, b):  # memory of its own, which untouched zeros have not
            ctypes.memset(matrix, 0x3F, ctypes.sizeof(matrix))
        best, end = math.inf, None
        while end is None or time.monotonic() < end:
            begun = time.thread_time()
            # of a linear layer: the transposed weight by the rows
            sgemm(b"T", b"N", m, n, k, one, a, k, b, k, zero, c, m)
            taken = time.thread_time() - begun
            if end is None:  # the first one sets kernels up
                end = time.monotonic() + TRIAL_S / len(shapes)
            else:
                best = min(best, taken)
        if best is math.inf:
            best = taken
        rates.append(2e-9 * outputs * inputs * ROWS / best)
    return math.exp(sum(map(math.log, rates)) / len(rates))


if __name__ == "__main__":
    print(_measure([tuple(shape) for shape in json.loads(sys.argv[1])]))
