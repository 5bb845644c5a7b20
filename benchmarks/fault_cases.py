"""Every fault of docs/faults.md: how it is caused in a running job, and what must come of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness import read_rows
from job import PATIENCE_S, Job, line_with


@dataclass(slots=True)
class Outcome:
    """What a fault came to."""

    saw: str  # the line the user saw
    seconds: float | None = None
    notes: list[str] = field(default_factory=list)


def recovers(job: Job, inject: Callable[[], None], *words: str) -> Outcome:
    """Inject, wait for the line with `words`, then for two further steps."""
    job.wait(lambda: job.steps() >= 6, "six steps")
    before = len(job.text())
    begun = time.monotonic()
    inject()
    job.wait(lambda: line_with(job.text()[before:], *words), f"a line with {words}")
    rows = job.run_dir / "metrics.jsonl"
    time.sleep(0.2)
    size = rows.stat().st_size
    at = [job.steps()]

    def moved() -> bool:
        nonlocal size
        if rows.stat().st_size < size:  # a recovery took rows back
            size, at[0] = rows.stat().st_size, job.steps()
        return job.steps() >= at[0] + 2

    job.wait(moved, "further steps")
    return Outcome(line_with(job.text()[before:], *words), time.monotonic() - begun)


FAULTS: dict[str, tuple[str, Callable[[Path], tuple[Job, Outcome]]]] = {}


def fault(title: str) -> Callable[[Callable[[Path], tuple[Job, Outcome]]], Callable[[Path], tuple[Job, Outcome]]]:
    def register(run: Callable[[Path], tuple[Job, Outcome]]) -> Callable[[Path], tuple[Job, Outcome]]:
        FAULTS[run.__name__] = (title, run)
        return run

    return register


def _kill(job: Job, word: str, number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    def inject() -> None:
        job.find(word)[-1].send_signal(number)

    return inject


@fault("rollout actor killed (kill -9) while generating")
def actor_killed(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    return job, recovers(job, _kill(job, "RolloutShell"), "is in the rotation")


@fault("engine stopped (SIGSTOP)")
def engine_stopped(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    return job, recovers(job, _kill(job, "RolloutShell", signal.SIGSTOP), "is in the rotation")


@fault("one of two actors killed: the other works on")
def one_of_two_killed(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder, "actor.bf16.count=2", "cluster.num_cpus=3")
    return job, recovers(job, _kill(job, "RolloutShell"), "is replaced")


@fault("learner rank killed in the middle of training")
def learner_killed(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    return job, recovers(job, _kill(job, "LearnerShell"), "recovery 1")


@fault("one of two ZeRO-2 learner ranks killed")
def rank_of_two_killed(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder, "learner.ranks=2", "learner.zero_stage=2", "cluster.num_cpus=3")
    return job, recovers(job, _kill(job, "LearnerShell"), "recovery 1")


@fault("learner rank stopped (SIGSTOP)")
def learner_stopped(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    return job, recovers(job, _kill(job, "LearnerShell", signal.SIGSTOP), "recovery 1")


@fault("replay buffer killed")
def buffer_killed(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    return job, recovers(job, _kill(job, "BufferShell"), "recovery 1")


@fault("graders' process killed")
def scorer_killed(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    return job, recovers(job, _kill(job, "ScorerShell"), "was restarted")


@fault("Ray's head (GCS) killed")
def head_killed(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    return job, recovers(job, _kill(job, "gcs_server"), "recovery 1")


@fault("everything killed (kill -9), then resumed")
def everything_killed(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    job.wait(lambda: job.steps() >= 7, "seven steps")
    job.kill_everything()
    return _resumed(folder)


@fault("driver alone killed (kill -9), then resumed")
def driver_killed(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    job.wait(lambda: job.steps() >= 7, "seven steps")
    job.family()
    job.process.kill()
    job.process.wait()
    left = job.left()
    assert not left, left
    return _resumed(folder)


@fault("newest checkpoint corrupted and the one before truncated, then resumed")
def checkpoint_damaged(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder, "checkpoint.keep=3")
    job.wait(lambda: job.steps() >= 17, "seventeen steps")
    job.kill_everything()
    older, newer = sorted((job.run_dir / "checkpoints").glob("step_*"))[-2:]
    damaged = next((newer / "learner").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-8] + b"\0corrupt")
    cut = next((older / "buffer").glob("*.safetensors"))
    cut.write_bytes(cut.read_bytes()[:-1])
    return _resumed(folder, "is passed over")


def _resumed(folder: Path, *words: str) -> tuple[Job, Outcome]:
    begun = time.monotonic()
    before = len((folder / "log").read_text(errors="replace"))
    job = Job(folder)
    job.wait(lambda: line_with(job.text()[before:], "continuing from"), "the run to continue")
    at = job.steps()
    job.wait(lambda: job.steps() >= at + 2, "further steps")
    return job, Outcome(line_with(job.text()[before:], *(words or ("continuing from",))), time.monotonic() - begun)


@fault("disk full during a checkpoint")
def disk_full(folder: Path) -> tuple[Job, Outcome]:
    target = folder / "run" / "checkpoints"
    target.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(target)], check=True)
    job = Job(folder, "checkpoint.every=5")
    filler = target / "filler"

    def fill() -> None:
        with contextlib.suppress(OSError), filler.open("wb") as f:
            while True:
                f.write(b"\0" * 65536)

    outcome = recovers(job, fill, "could not be written")
    filler.unlink()
    job.wait(lambda: line_with(job.text(), "is written again"), "a checkpoint after the disk was freed")
    return job, outcome


def _grader(folder: Path, kind: str) -> Job:
    code = folder / "bad_grader.py"
    code.write_text(
        "import sys, time\n"
        "from rlcore.tasks.digits import Digits\n"
        "class Bad(Digits):\n"
        "    def __init__(self, *, min_digits=2, max_digits=3, op='sort', seed=0):\n"
        "        super().__init__(min_digits=min_digits, max_digits=max_digits, op=op, seed=seed)\n"
        "    def grade(self, item, response):\n"
        "        if sum(map(ord, item.question)) % 37 == 0 and response[:1] > '4':\n"
        + {
            "raises": "            raise RuntimeError('the grader cannot judge this')\n",
            "hangs": "            time.sleep(10**6)\n",
            "leaks": "            hold = []\n            while True: hold.append(bytearray(10**7))\n",
            "prints": "            while True: print('x' * 1000)\n",
        }[kind]
        + "        return super().grade(item, response)\n"
    )
    return Job(folder, f"task.name={code}:Bad", "task.grade_timeout_s=2")


def _bad_grader(folder: Path, kind: str) -> tuple[Job, Outcome]:
    job = _grader(folder, kind)
    errors = ("ledger/score_errors", "ledger/score_timeouts")
    job.wait(lambda: any(r[e] for r in read_rows(job.run_dir)[-1:] for e in errors), "a failed score")
    at = job.steps()
    seconds = job.wait(lambda: job.steps() >= at + 2, "further steps")
    row = read_rows(job.run_dir)[-1]
    saw = ", ".join(f"{e} {row[e]:.0f}" for e in errors if row[e]) + " of the row; the samples leave their group"
    return job, Outcome(saw, seconds)


@fault("a grader that raises")
def grader_raises(folder: Path) -> tuple[Job, Outcome]:
    return _bad_grader(folder, "raises")


@fault("a grader that hangs")
def grader_hangs(folder: Path) -> tuple[Job, Outcome]:
    return _bad_grader(folder, "hangs")


@fault("a grader that leaks memory")
def grader_leaks(folder: Path) -> tuple[Job, Outcome]:
    return _bad_grader(folder, "leaks")


@fault("a grader that prints for ever")
def grader_prints(folder: Path) -> tuple[Job, Outcome]:
    return _bad_grader(folder, "prints")


@fault("NaN in the loss")
def nan_loss(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder, "checkpoint.every=2", fault="nan_loss")
    begun = time.monotonic()
    code = job.end(PATIENCE_S)
    assert code == 1, (code, job.text()[-2000:])
    saw = line_with(job.text(), "the run ended")
    assert job.steps() == 3, job.steps()
    resumed, _ = _resumed(folder)
    return resumed, Outcome(saw, None, [f"resumed after {time.monotonic() - begun:.0f} s"])


@fault("a weight update that loses one tensor")
def lost_tensor(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder, "cluster.verify_weights=full", fault="lost_tensor")
    job.wait(job.mark.exists, "the lost tensor")
    seconds = job.wait(lambda: line_with(job.text(), "is in the rotation"), "a replacement")
    at = job.steps()
    seconds += job.wait(lambda: job.steps() >= at + 2, "further steps")
    return job, Outcome(line_with(job.text(), "is replaced"), seconds)


@fault("one of two actors at a tenth of the speed")
def slow_actor(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder, "actor.bf16.count=2", "cluster.num_cpus=3", fault="slow_actor")
    job.wait(lambda: job.steps() >= 40, "forty steps")
    given: Counter[str] = Counter()
    for file in (job.run_dir / "samples").glob("step_*.jsonl"):
        given.update(json.loads(line)["actor"] for line in file.read_text().splitlines())
    shares = ", ".join(f"{name} {n / sum(given.values()):.0%}" for name, n in sorted(given.items()))
    return job, Outcome(f"nothing; shares of the samples trained on: {shares}")


@fault("wall clock jumps ahead by a day (in the Python processes)")
def clock_jump(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder, fault="clock_jump")
    job.wait(lambda: job.steps() >= 6, "six steps")
    job.mark.touch()
    at = job.steps()
    seconds = job.wait(lambda: job.steps() >= at + 5, "further steps")
    row = read_rows(job.run_dir)[-1]
    assert row["time/step_s"] < 60 and row["rollout/replacements"] == 0, row
    return job, Outcome("nothing", seconds)


@fault("SIGTERM, then resumed")
def sigterm(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    job.wait(lambda: job.steps() >= 6, "six steps")
    begun = time.monotonic()
    code = job.stop()
    took = time.monotonic() - begun
    assert code == 130 and not job.left(), (code, job.left())
    saw = line_with(job.text(), "SIGTERM")
    resumed, outcome = _resumed(folder)
    return resumed, Outcome(saw, outcome.seconds, [f"checkpoint and end {took:.0f} s after the signal"])


@fault("Ctrl-C: SIGINT to the whole process group")
def sigint_to_all(folder: Path) -> tuple[Job, Outcome]:
    job = Job(folder)
    job.wait(lambda: job.steps() >= 6, "six steps")
    job.family()
    os.killpg(job.process.pid, signal.SIGINT)
    code = job.end()
    assert code == 130 and not job.left(), (code, job.left(), job.text()[-2000:])
    saw = line_with(job.text(), "SIGINT")
    resumed, outcome = _resumed(folder)
    return resumed, Outcome(saw, outcome.seconds)
