"""Runs whole `rlcore` commands and reads their results; shared by the scripts of this folder."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import psutil

from rlcore.metrics.rows import run_rows


def again(module: ModuleSpec | None) -> list[str]:
    """The command of a benchmark, by its `__spec__`, for another process of it. Raises RuntimeError
    where that was not started by `python -m`."""
    if module is None:
        raise RuntimeError("benchmarks are started by python -m benchmarks.FOLDER.NAME")
    return [sys.executable, "-m", module.name]


@dataclass(slots=True)
class Run:
    """One finished command."""

    words: list[str]
    seconds: float
    code: int
    rows: list[dict[str, Any]]
    peak_memory: float  # bytes, all processes of the run together, shared pages counted once (PSS)
    memory: list[tuple[float, float]] = field(default_factory=list)  # (seconds, bytes)
    output: str = ""
    processes: dict[str, float] = field(default_factory=dict)  # peak bytes by process (PSS)


def rlcore(
    *words: str, run_dir: str | Path | None = None, timeout_s: float = 3600, every_s: float = 1.0
) -> Run:
    """Run `rlcore WORDS run_dir=...` and sample the memory of its process tree.

    Raises RuntimeError on a non-zero exit code, TimeoutError after `timeout_s`.
    """
    folder = Path(run_dir or tempfile.mkdtemp(prefix="rlcore-bench-"))
    command = [str(Path(sys.executable).parent / "rlcore"), *words, f"run_dir={folder}"]
    log = folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    start, memory = time.monotonic(), []
    peaks: dict[str, float] = {}
    marker = f"bench-{os.getpid()}-{time.monotonic_ns()}"
    with log.open("w") as out:
        environment = {**os.environ, "RLCORE_BENCH": marker}
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        while child.poll() is None:
            if time.monotonic() - start > timeout_s:
                child.terminate()
                raise TimeoutError(
                    f"{' '.join(command)} ran longer than {timeout_s:g} s; see {log}"
                )
            held = tree_memory(child.pid)
            memory.append((time.monotonic() - start, sum(held.values())))
            peaks = {name: max(held.get(name, 0), peaks.get(name, 0)) for name in held | peaks}
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=every_s)
    text = log.read_text(errors="replace")
    if child.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} exited with {child.returncode}:\n{text[-3000:]}")
    return Run(
        list(words),
        time.monotonic() - start,
        child.returncode,
        read_rows(folder),
        max((m for _, m in memory), default=0.0),
        memory,
        text,
        peaks,
    )


def read_rows(run_dir: str | Path) -> list[dict[str, Any]]:
    """The rows of a run directory, with all columns."""
    return run_rows(run_dir)


def tree_memory(pid: int) -> dict[str, float]:
    """Proportional set size in bytes of a process and all its descendants, by role and process."""
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return {}
    held: dict[str, float] = {}
    for process in family:
        try:
            held[f"{role(process.cmdline())} {process.pid}"] = process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return held


def role(command: Sequence[str]) -> str:
    """What a process of a run is for, from its command line; an actor's is its class.

    Examples: ["ray::LearnerActor.train_step"] is LearnerActor, ["python", "bin/rlcore", "train"]
    is rlcore."""
    words = [w for w in command if w]
    if not words:
        return "ended"
    if words[0].startswith("ray::"):
        return words[0].removeprefix("ray::").split(".")[0].split(" ")[0]
    first = Path(words[0]).name
    scripts = [Path(w).name for w in words[1:] if not w.startswith("-")]
    return scripts[0] if first.startswith("python") and scripts else first


def table(rows: Sequence[Mapping[str, Any]], columns: Iterable[str] | None = None) -> str:
    """A Markdown table; floats with four significant digits."""
    columns = list(columns or rows[0])
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    for row in rows:
        cells = [row.get(c, "") for c in columns]
        lines.append(
            "| " + " | ".join(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells) + " |"
        )
    return "\n".join(lines)


def machine() -> str:
    """One line that names the machine, with the cores that this process may use."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "unknown CPU",
    )
    memory = psutil.virtual_memory().total / 2**30
    cores = len(os.sched_getaffinity(0))
    counted = "1 core" if cores == 1 else f"{cores} cores"
    return f"{counted} of {model}, {memory:.0f} GiB, no GPU"


def median(values: Iterable[float]) -> float:
    return float(statistics.median(list(values)))
