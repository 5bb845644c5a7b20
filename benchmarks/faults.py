"""`make faults`: cause every fault for real in a running job, and print what came of it.

    python benchmarks/faults.py [NAME ...] [--out docs/faults.md]

Each fault gets a run of its own: the smallest model, asynchronous, a checkpoint every five steps. It is injected after
a few steps; then the run must go on (or end as promised and be resumed), is stopped, and its books are audited from
the last checkpoint: every group ever admitted is live or left exactly once. "Lost" are groups that left in another way
than by being trained on; "twice" are groups trained on more than once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from harness import machine, read_rows, table

HERE = Path(__file__).resolve().parent
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
PATIENCE_S = 240.0


class Job:
    """A running `rlcore train`, seen from outside."""

    def __init__(self, folder: Path, *words: str, fault: str = "") -> None:
        self.folder, self.run_dir, self.log = folder, folder / "run", folder / "log"
        self.mark = folder / "mark"
        cache = f"model.warmup.cache_dir={folder.parent / 'warm'}"
        resume = (self.run_dir / "config.yaml").exists()
        self.words = [f"run_dir={self.run_dir}", *(["resume=auto"] if resume else [*SMALL, cache]), *words]
        path = [str(HERE / "fault_injection"), *filter(None, [os.environ.get("PYTHONPATH")])]
        injection = {"RLCORE_FAULT": fault, "RLCORE_FAULT_MARK": str(self.mark), "PYTHONPATH": os.pathsep.join(path)}
        environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", **(injection if fault else {})}
        self.process = subprocess.Popen(
            [str(Path(sys.executable).parent / "rlcore"), "train", *self.words],
            stdout=self.log.open("a"),
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        self.seen: set[psutil.Process] = set()

    def family(self) -> list[psutil.Process]:
        """The run's processes, now."""
        try:
            found = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        self.seen |= set(found)
        return found

    def find(self, word: str) -> list[psutil.Process]:
        """Its processes whose command line holds a word, such as a Ray actor's class."""
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

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> float:
        """Seconds until a condition holds while the run lives."""
        begun = time.monotonic()
        while not condition():
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended ({self.process.returncode}) before {what}:\n{self.text()[-2000:]}")
            if time.monotonic() - begun > timeout_s:
                raise TimeoutError(f"{what} did not come in {timeout_s:g} s:\n{self.text()[-2000:]}")
            time.sleep(0.1)
        return time.monotonic() - begun

    def end(self, timeout_s: float = 90.0) -> int:
        """Wait for the run's own end."""
        return self.process.wait(timeout_s)

    def stop(self) -> int:
        """Ask the run to stop with a checkpoint."""
        self.family()
        self.process.send_signal(signal.SIGTERM)
        return self.end()

    def kill_everything(self) -> None:
        """kill -9 of every process of the run."""
        for p in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                p.kill()
        self.process.wait(30)

    def left(self, grace_s: float = 20.0) -> list[str]:
        """Processes of the run that outlived it."""
        _, alive = psutil.wait_procs(list(self.seen), timeout=grace_s)
        names = []
        for p in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                if p.status() != psutil.STATUS_ZOMBIE:
                    names.append(" ".join(p.cmdline())[:80] or p.name())
        return names


@dataclass(slots=True)
class Audit:
    """The books of a run, from its newest checkpoint."""

    admitted: int
    consumed: int
    live: int
    lost: int  # left, but not by being trained on, or not accounted for at all
    twice: int
    staleness: float


def audit(run_dir: Path, groups_per_step: int = 8) -> Audit:
    """Recount every group from the departures that the ledger names one by one."""
    newest = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    state = json.loads(json.loads((newest / "buffer" / "state.json").read_text())["state"])
    ledger = state["ledger"]
    departures = ledger["recent"]
    counted = Counter(g for g, how in departures if how.startswith("consumed"))
    gone = {g for g, _ in departures}
    oldest = min(gone, default=0)  # the ledger names the last few thousand; earlier ones it only counts
    expected = set(range(oldest, ledger["admitted"]))
    missing = expected - gone - set(ledger["live"])
    lost = len(missing) + sum(ledger["evicted"].values()) + sum(ledger["failed"].values())
    twice = sum(n > 1 for n in counted.values()) + len(gone & set(ledger["live"]))
    steps = int(newest.name.split("_")[1])
    assert ledger["consumed"] == steps * groups_per_step, (ledger["consumed"], steps)
    rows = read_rows(run_dir)
    return Audit(
        ledger["admitted"], ledger["consumed"], len(ledger["live"]), lost, twice, max(r["staleness/max"] for r in rows)
    )


@dataclass(slots=True)
class Outcome:
    """What a fault came to."""

    saw: str  # the line the user saw
    seconds: float | None = None
    notes: list[str] = field(default_factory=list)


def line_with(text: str, *words: str) -> str:
    """The last line of the log that holds all words, shortened."""
    found = [" ".join(line.split()) for line in text.splitlines() if all(w in line for w in words)]
    return re.sub(r"^\d\d:\d\d:\d\d ", "", found[-1])[:200] if found else ""


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


@contextlib.contextmanager
def _folder(root: Path, name: str) -> Iterator[Path]:
    folder = root / name
    folder.mkdir()
    try:
        yield folder
    finally:
        mounted = folder / "run" / "checkpoints"
        if mounted.is_mount():
            subprocess.run(["umount", "--lazy", str(mounted)], check=True)


def run(name: str, root: Path) -> dict[str, Any]:
    """One fault from start to audit."""
    title, scenario = FAULTS[name]
    with _folder(root, name) as folder:
        job: Job | None = None
        try:
            job, outcome = scenario(folder)
            code = job.stop()
            if code != 130:
                raise RuntimeError(f"{name}: the stop after it ended with {code}:\n{job.text()[-2000:]}")
            left = job.left()
            books = audit(job.run_dir)
        finally:
            if job is not None and job.process.poll() is None:
                job.kill_everything()
    return {
        "injected": title,
        "what the user saw": "; ".join([outcome.saw, *outcome.notes]).replace("|", "/").replace(str(root), ""),
        "groups": books.admitted,
        "lost": books.lost,
        "twice": books.twice,
        "staleness": f"{books.staleness:.0f}",
        "left over": len(left),
        "seconds to recover": "" if outcome.seconds is None else f"{outcome.seconds:.0f}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FAULTS)}; default: all")
    parser.add_argument("--out", help="also write the table to this Markdown file")
    chosen = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="rlcore-faults-"))
    rows, failed = [], []
    for name in chosen.names or FAULTS:
        try:
            rows.append(run(name, root))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
        except Exception as e:  # the next fault is tried all the same; the exit code tells
            failed.append(name)
            print(f"{name} FAILED: {type(e).__name__}: {e}", flush=True)
    text = table(rows) if rows else "nothing ran"
    print(f"\n{text}\n\n{machine()}")
    bad = [r["injected"] for r in rows if r["lost"] or r["twice"] or r["left over"]]
    if chosen.out and rows:
        path = Path(chosen.out)
        kept = path.read_text().split("<!-- table -->")[0] if path.exists() else ""
        path.write_text(f"{kept}<!-- table -->\n\n{text}\n\nOn {machine()}.\n")
    shutil.rmtree(root / "warm", ignore_errors=True)
    if failed or bad:
        print(f"failed: {failed}; books or processes not clean after: {bad}; logs under {root}")
        return 1
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
