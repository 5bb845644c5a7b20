"""The tiers of tests: what runs in each, and how much processor time it may take.

    python tests/tiers.py fast                         what starts no process: for every edit
    python tests/tiers.py test                         what decides whether a change is accepted
    python tests/tiers.py changed --base COMMIT        tests of the modules that changed since then
    python tests/tiers.py slow                         the rest, but for what takes a night
    python tests/tiers.py rest --base COMMIT --shard N --budget-s S
                                                       slow tests of changed modules, then one of
                                                       six shares of all slow tests
    python tests/tiers.py nightly                      tests that take a quarter of an hour and more

The Makefile has a target for each. A tier is a sequence of parts, cheap ones first, each a run of
pytest; the first that fails ends it. mypy runs beside the tests of `test`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import timing

ROOT = Path(__file__).resolve().parents[1]
ROTATING = ("tests/commands/test_fault_rows.py",)  # two of its tests with --turn
SHARDS = 6  # of the slow tier; .ci/run takes the next with every commit


@dataclass(frozen=True, slots=True)
class Part:
    """One run of pytest."""

    marks: str  # pytest's -m
    workers: int  # processes that run tests side by side; 1: no pytest-xdist
    cpu_s: float  # budget: processor seconds of all its tests on the reference machine
    torch_threads: int | None = None  # of each worker; None: as many as torch takes by itself


STARTED = "engine or ranks or cluster"
# Budgets are nearly twice what tests took when they were set: two side by side on two threads of
# one core take up to 1.6 times the processor time of one alone. Those of `fast` took 331 and 445 s
# within half an hour on one machine. On a machine whose clock time was seven times the reference,
# `fast` took 540 s and `processes` 323 s: the scale cannot remove what many neighbours cost.
PARTS = {
    "fast": Part(f"not slow and not nightly and not processes and not ({STARTED})", 2, 900, 1),
    "processes": Part(f"processes and not slow and not nightly and not ({STARTED})", 2, 500),
    "started": Part(f"({STARTED}) and not slow and not nightly", 2, 1300),
    "slow": Part("slow and not nightly", 1, 2400),
    "nightly": Part("nightly", 1, 14400),
}
TIERS = {
    "fast": ("fast",),
    "test": ("fast", "processes", "started"),
    "changed": ("fast", "processes", "started", "slow"),
    "slow": ("slow",),
    "rest": ("slow",),
    "nightly": ("nightly",),
}
DECIDING = ("test", "rest")  # what .ci/run runs
# Seconds that one test may take on the reference machine, quiet, by what it starts. The mark
# `timeout` gives a test another limit. Both are scaled as deadlines are (tests/timing.py).
TIMEOUTS_S = {"slow": 300, "cluster": 300, "engine": 180, "ranks": 180, "processes": 180}
TIMEOUT_S = 60


def main(words: Sequence[str] | None = None) -> int:
    asked = _asked(sys.argv[1:] if words is None else words)
    only: list[str] = []
    if asked.tier == "rest" and asked.budget_s <= 0:
        print(f"tests: no slow test is started: {asked.budget_s:.0f} s are left", flush=True)
        return 0
    if asked.tier in ("changed", "rest"):
        only = _selection(asked)
        if not only:
            return 0
    # `rest` ends what CI runs, on machines that may get busy meanwhile: twice the time to wait.
    room = 2 if asked.tier == "rest" else 1
    timing.crowd(max(room, *(PARTS[name].workers for name in TIERS[asked.tier])))
    with _types(asked.tier == "test") as types:
        for name in TIERS[asked.tier]:
            whole = not only and not asked.pytest
            settled = ["--hypothesis-profile=settled"] if asked.tier in DECIDING else []
            code = _run(name, [*settled, *only, *asked.pytest], whole)
            if code:
                return code
        return types.finish()


def _asked(words: Sequence[str]) -> argparse.Namespace:
    """The command's words; `pytest` holds those after "--"."""
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="python tests/tiers.py", epilog="Words after -- go to pytest."
    )
    parser.add_argument("tier", choices=TIERS)
    parser.add_argument("--base", default="", help="commit that changes are counted from")
    parser.add_argument("--shard", type=int, default=0, help=f"which of {SHARDS} shares; any int")
    parser.add_argument("--budget-s", type=float, default=1500, help="start nothing after it")
    asked = parser.parse_args(words[:at])
    asked.pytest = list(words[at + 1 :])
    return asked


def _run(name: str, further: Sequence[str], whole: bool) -> int:
    """One part. `whole`: all its tests run, so that its budget holds."""
    part = PARTS[name]
    words = [sys.executable, "-m", "pytest", "-m", part.marks, *further]
    if part.workers > 1:  # a file stays whole: its fixtures are made once
        words += ["-n", str(part.workers), "--dist", "loadfile"]
    if whole:
        words += ["--budget", name]
    print(f"tests: {name}", flush=True)
    began = time.monotonic()
    threads = {"OMP_NUM_THREADS": str(part.torch_threads)} if part.torch_threads else {}
    code = subprocess.run(words, cwd=ROOT, env={**os.environ, **threads}).returncode
    print(f"tests: {name} took {time.monotonic() - began:.0f} s", flush=True)
    return 0 if code == 5 else code  # 5: no test was selected


def _selection(asked: argparse.Namespace) -> list[str]:
    """Words for pytest that select what changed, and of `rest` a share of the slow tier. Empty:
    nothing to run."""
    import changes

    words = ["--until", str(time.time() + asked.budget_s)] if asked.tier == "rest" else []
    try:
        files = changes.tests_since(asked.base) if asked.base else []
    except changes.UnknownCommit as e:
        print(f"tests: {e}; no test is selected by what changed", flush=True)
        files = []
    print(f"tests: {len(files)} files belong to what changed since {asked.base or '?'}", flush=True)
    if asked.tier == "rest":
        shard = asked.shard % SHARDS
        print(f"tests: share {shard} of {SHARDS} of the slow tier", flush=True)
        # Another order with every commit: the time may not suffice for all that a change touches.
        words += ["--shard", f"{shard}/{SHARDS}", "--shuffle", str(asked.shard)]
        words += ["--turn", str(asked.shard)]
    elif not files:
        return []
    return [*words, "--changed", ",".join(files)]


class _Types:
    """mypy, run beside the tests."""

    def __init__(self, wanted: bool, log) -> None:
        words = [sys.executable, "-m", "mypy"]
        self._log = log
        self.process = (
            subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            if wanted
            else None
        )

    def finish(self) -> int:
        """Its exit code; prints what it found."""
        if self.process is None:
            return 0
        code = self.process.wait(timing.deadline(600))
        self._log.seek(0)
        print(f"types: {self._log.read().decode().strip()}", flush=True)
        return code


@contextlib.contextmanager
def _types(wanted: bool) -> Iterator[_Types]:
    with tempfile.TemporaryFile() as log:
        types = _Types(wanted, log)
        try:
            yield types
        finally:
            if types.process is not None and types.process.poll() is None:
                types.process.kill()
                types.process.wait()


if __name__ == "__main__":
    sys.exit(main())
