"""Whole `rlcore` commands on one GPU, beside each other: starting them, ending them, their rows.

Commands run in sessions of their own, so that what they started (Ray's daemons, engines) can be
ended with them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil
from check import Rows, machine
from setting import Row

from rlcore.metrics.rows import run_rows

PROGRAM = "import sys; from rlcore.cli import main; sys.exit(main())"
QUIET = ("logging.report=false", "logging.wandb=disabled", "checkpoint.every_s=0")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
}


class Clock:
    """Seconds of a budget that has begun."""

    def __init__(self, budget_s: float) -> None:
        self._begun, self._budget_s = time.monotonic(), budget_s

    @property
    def passed(self) -> float:
        return time.monotonic() - self._begun

    @property
    def left(self) -> float:
        return self._budget_s - self.passed

    def say(self, text: str) -> None:
        """Print a line with the seconds that have passed."""
        print(f"{self.passed:6.1f} s: {text}", flush=True)


def parser(description: str | None, budget_s: float) -> argparse.ArgumentParser:
    """The options that all programmes of whole runs have."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kept = Path(tempfile.gettempdir()) / "rlcore-gpu"
    found.add_argument("--work", type=Path, default=kept, help="folder of models, runs and logs")
    found.add_argument("--budget", type=float, default=budget_s, help="seconds of everything")
    found.add_argument("--out", type=Path, help="rows as JSON lines, appended")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: dry run")
    found.add_argument("words", nargs="*", help="further words of every run")
    return found


def opened(args: argparse.Namespace, name: str, shape: str) -> Rows:
    """The file of a programme's rows, with one that names the machine."""
    rows = Rows((args.out or Path(f"gpu_check_{name}.jsonl")).resolve())
    rows.add(machine(args.device, shape))
    return rows


def start(
    words: Sequence[str], log: Path, program: Sequence[str] = ("-c", PROGRAM)
) -> subprocess.Popen[bytes]:
    """Start a command, by default `rlcore WORDS`, with its output in `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        out.write(f"$ {' '.join(words)}\n")
        out.flush()
        return subprocess.Popen(
            [sys.executable, *program, *words],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT | os.environ,
            start_new_session=True,
        )


def stop(commands: Iterable[subprocess.Popen[bytes]], grace_s: float = 10.0) -> None:
    """Interrupt commands, which lets them close, then kill them and what they started."""
    alive = [c for c in commands if c.poll() is None]
    below: list[psutil.Process] = []
    for command in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            below += psutil.Process(command.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(command.pid, signal.SIGINT)
    end = time.monotonic() + grace_s
    while time.monotonic() < end and any(c.poll() is None for c in alive):
        time.sleep(0.2)
    for command in alive:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for command in alive:
        command.wait(30)


def run(
    words: Sequence[str], log: Path, limit_s: float, program: Sequence[str] = ("-c", PROGRAM)
) -> int | str:
    """Run a command for at most `limit_s`: its exit code, or that it was stopped."""
    command = start(words, log, program)
    try:
        return command.wait(max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        return "stopped"
    finally:
        stop([command], grace_s=5.0)


def steps_of(run_dir: Path) -> list[Row]:
    """The rows of a run's steps, none before its first."""
    return [row for row in run_rows(run_dir) if "time/step_s" in row]


def tail(path: Path, characters: int = 2500) -> str:
    return path.read_text(errors="replace")[-characters:] if path.exists() else "(no log)"


def numbers(rows: Iterable[Row], key: str) -> list[float]:
    """The values that rows have of a metric."""
    return [row[key] for row in rows if isinstance(row.get(key), int | float)]


def mean(rows: Iterable[Row], key: str) -> float | None:
    found = numbers(rows, key)
    return sum(found) / len(found) if found else None
