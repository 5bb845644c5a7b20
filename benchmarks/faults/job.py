"""A small run controlled from outside: started, watched, killed, and its ledger audited.

The audit compares the ledger of the last checkpoint with a log that the learner's processes write
of the groups they trained on (fault_injection/sitecustomize.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil

from benchmarks.harness import read_rows

HERE = Path(__file__).resolve().parent
TRAINED = "trained.jsonl"  # the log of what was trained on, next to the run directory
SMALL = (
    "experiment=quickstart",
    "model.fresh.hidden_size=64",
    "model.fresh.layers=2",
    "model.fresh.intermediate_size=192",
    "model.warmup.steps=60",  # enough for mixed rewards, so that every step has a gradient
    "model.warmup.batch_size=64",
    "task.args.min_digits=2",
    "task.args.max_digits=3",
    "schedule.groups_per_step=8",
    "rollout.samples_per_prompt=4",
    "evaluation.prompts=8",
    "evaluation.every=10",
    "logging.wandb=disabled",
    "logging.console=plain",
    "logging.report=false",
    "cluster.object_store_mib=128",
    "cluster.heartbeat_s=1",
    "cluster.hang_timeout_s=10",
    "checkpoint.every=5",
    "schedule.steps=100000",
)


def environment(folder: Path, fault: str = "") -> dict[str, str]:
    """Variables of the processes of a job in `folder`: they have the fault, and log what is trained
    on."""
    path = [str(HERE / "fault_injection"), *filter(None, [os.environ.get("PYTHONPATH")])]
    injection = {
        "RLCORE_FAULT": fault,
        "RLCORE_FAULT_MARK": str(folder / "mark"),
        "RLCORE_TRAINED": str(folder / TRAINED),
        "PYTHONPATH": os.pathsep.join(path),
    }
    return {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", **injection}


class Job:
    """A running `rlcore train`. Every wait has a deadline of `patience_s`."""

    patience_s = 240.0
    # every job of this script, so that all of their processes can be killed at the end
    started: ClassVar[list[Job]] = []
    # what remains to be undone after that, such as a mounted disk
    afterwards: ClassVar[list[Callable[[], None]]] = []

    def __init__(self, folder: Path, *words: str, fault: str = "") -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.log = folder / "log"
        self.mark = folder / "mark"
        cache = f"model.warmup.cache_dir={folder.parent / 'warm'}"
        resume = (self.run_dir / "config.yaml").exists()
        self.words = [
            f"run_dir={self.run_dir}",
            *(["resume=auto"] if resume else [*SMALL, cache]),
            *words,
        ]
        self.process = subprocess.Popen(
            [str(Path(sys.executable).parent / "rlcore"), "train", *self.words],
            stdout=self.log.open("a"),
            stderr=subprocess.STDOUT,
            env=environment(folder, fault),
            start_new_session=True,
        )
        self.seen: set[psutil.Process] = set()
        self.started.append(self)

    def family(self) -> list[psutil.Process]:
        """The processes of the run that are alive now."""
        try:
            found = [
                psutil.Process(self.process.pid),
                *psutil.Process(self.process.pid).children(recursive=True),
            ]
        except psutil.NoSuchProcess:
            return []
        self.seen |= set(found)
        return found

    def find(self, word: str) -> list[psutil.Process]:
        """Processes whose command line contains a word, such as the class of a Ray actor."""
        found = []
        for p in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                if word in " ".join(p.cmdline()) or word in p.name():
                    found.append(p)
        return found

    def steps(self) -> int:
        rows = read_rows(self.run_dir)
        return rows[-1]["step"] if rows else 0

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(
        self, condition: Callable[[], Any], what: str, timeout_s: float | None = None
    ) -> float:
        """Seconds until a condition holds. Raises if the run ends before that."""
        timeout_s = self.patience_s if timeout_s is None else timeout_s
        begun = time.monotonic()
        while not condition():
            if self.process.poll() is not None:
                code = self.process.returncode
                raise RuntimeError(f"the run ended ({code}) before {what}:\n{self.text()[-2000:]}")
            if time.monotonic() - begun > timeout_s:
                raise TimeoutError(f"no {what} within {timeout_s:g} s:\n{self.text()[-2000:]}")
            time.sleep(0.1)
        return time.monotonic() - begun

    def end(self) -> int:
        """Wait for the run to end by itself; its exit code."""
        return self.process.wait(self.patience_s)

    def stop(self) -> int:
        """Stop the run with SIGTERM, which writes a checkpoint; its exit code."""
        self.family()
        self.process.send_signal(signal.SIGTERM)
        return self.end()

    def kill_everything(self) -> None:
        """kill -9 of every process of the run, including those that outlived their parent."""
        for p in {*self.family(), *self.seen}:
            with contextlib.suppress(psutil.NoSuchProcess):
                p.kill()
        self.process.wait(30)

    def left(self, grace_s: float = 20.0) -> list[str]:
        """Processes of the run that outlived it."""
        deadline = time.monotonic() + grace_s
        while (alive := [p for p in self.seen if _lives(p)]) and time.monotonic() < deadline:
            time.sleep(0.2)
        names = []
        for p in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                names.append(" ".join(p.cmdline())[:80] or p.name())
        return names


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@dataclass(slots=True)
class Audit:
    """The groups of a run, from its newest checkpoint."""

    admitted: int
    consumed: int
    live: int
    lost: int  # left without being trained on, or not accounted for
    twice: int
    staleness: float


def trained_on(record: Path, steps: int) -> list[int]:
    """Groups that the learner's log lists for the first `steps` steps, with repetitions.

    A recovery returns to a checkpoint: steps that follow it and are logged again replace the
    earlier ones.
    """
    kept: dict[tuple[int, int], list[int]] = {}
    for text in record.read_text().splitlines():
        line = json.loads(text)
        step, rank = line["step"], line["rank"]
        kept = {at: groups for at, groups in kept.items() if at[0] <= step and at != (step, rank)}
        kept[step, rank] = line["groups"]
    missing = set(range(steps)) - {at for at, _ in kept}
    assert not missing, f"steps without a record: {sorted(missing)[:5]}"
    return [g for (at, _), groups in kept.items() if at < steps for g in groups]


def audit(run_dir: Path, groups_per_step: int = 8) -> Audit:
    """Count every group from the ledger's list of departures and from the learner's log."""
    newest = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    state = json.loads(json.loads((newest / "buffer" / "state.json").read_text())["state"])
    steps = int(newest.name.split("_")[1])
    assert state["ledger"]["consumed"] == steps * groups_per_step, (
        state["ledger"]["consumed"],
        steps,
    )
    staleness = max(r["staleness/max"] for r in read_rows(run_dir))
    return recount(state["ledger"], trained_on(run_dir.parent / TRAINED, steps), staleness)


def recount(ledger: dict[str, Any], trained: list[int], staleness: float) -> Audit:
    """Compare a ledger with the groups that were trained on."""
    departures = ledger["recent"]
    consumed = {g for g, how in departures if how.startswith("consumed")}
    left, live = {g for g, _ in departures}, set(ledger["live"])
    # the ledger lists the last few thousand departures and only counts earlier ones
    oldest = min(left, default=0)
    named = {g for g in trained if g >= oldest}
    lost = set(range(oldest, ledger["admitted"])) - left - live
    lost |= consumed - named  # consumed by the ledger, but never trained on
    departed = [g for g, _ in departures]
    again = {g for found in (trained, departed) for g, n in Counter(found).items() if n > 1}
    again |= (named - consumed) | (left & live)  # trained on, and would be assigned again
    counted = sum(ledger["evicted"].values()) + sum(ledger["failed"].values())
    return Audit(
        ledger["admitted"],
        ledger["consumed"],
        len(live),
        len(lost) + counted,
        len(again),
        staleness,
    )


def line_with(text: str, *words: str) -> str:
    """The last line of the log that contains all words, shortened; "" if there is none."""
    found = [" ".join(line.split()) for line in text.splitlines() if all(w in line for w in words)]
    return re.sub(r"^\d\d:\d\d:\d\d ", "", found[-1])[:200] if found else ""
