"""`rlcore sweep`: the same run with several seeds or settings, and one report over all."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Literal

from rlcore.cluster.specs import joined_address, python_words
from rlcore.cluster.warm import Nursery
from rlcore.commands.launching import launch
from rlcore.commands.owner import own
from rlcore.config.compose import load
from rlcore.config.groups import each_value
from rlcore.config.schema import RunConfig
from rlcore.errors import Faults, StageError, UserError
from rlcore.launch.job import render
from rlcore.launch.specs import ELSEWHERE
from rlcore.metrics.sinks import FINAL, read_status
from rlcore.rooms import from_room
from rlcore.spec import refuse

SUBMITTED = "submitted"  # file in the folder of a run that a scheduler has taken
STOPPED = 130
# What runs on CPUs import, for processes that are forked with it. Settings of vLLM's environment
# come first, and DeepSpeed before vLLM, which puts a placeholder in the place of triton.
IMPORTS = (
    "rlcore.rollout.engines.vllm",
    "deepspeed",
    "peft",
    "rlcore.learner.rank",
    "rlcore.learner.engines.deepspeed",
    "rlcore.rollout.engines.vllm.engine",
    "vllm.v1.worker.cpu_worker",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)
State = Literal["finished", "failed", "submitted", "stopped"]
Start = Callable[[Sequence[str]], int]


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a sweep. Example: Job("seed-1", ("seed=1", "run_dir=runs/s/seed-1"), config)"""

    name: str
    words: tuple[str, ...]
    config: RunConfig

    @property
    def folder(self) -> Path:
        return Path(self.config.run_dir)

    @property
    def finished(self) -> bool:
        status = read_status(self.folder)
        done = status is not None and status["phase"] == "ended"
        return done and int(status["step"]) >= self.config.schedule.steps if status else False

    @property
    def queued(self) -> bool:
        """True if a scheduler has the job, as far as the job's folder shows."""
        status = read_status(self.folder)
        over = status is not None and status["phase"] in FINAL
        return (self.folder / SUBMITTED).exists() and not over


def jobs(words: Sequence[str], config_dir: str | None = None) -> list[Job]:
    """Every combination of the values that the words name, checked as a run is.

    `seed=0,1,2` and `learner.lr=1e-4,3e-4` are Hydra's choices, `seed=range(4)` its ranges. Raises
    UserError if no word has several values, or a combination is refused.
    """
    parent = next((w.partition("=")[2] for w in words if w.startswith("run_dir=")), "")
    refuse(not parent, "run_dir= is missing: name the folder to hold the runs of the sweep.")
    others = [word for word in words if not word.startswith("run_dir=")]
    choices = [each_value(word) for word in others]
    refuse(
        all(len(values) == 1 for values in choices),
        "The words name one run: give a key several values, such as seed=0,1,2, or use rlcore "
        "train.",
    )
    found: list[Job] = []
    faults = Faults()
    for combination in product(*choices):
        varied = [word for word, values in zip(combination, choices) if len(values) > 1]
        # A folder's name, such as "seed-1_learner.lr-0.0001": run_dir takes no "=" unquoted.
        name = "_".join(re.sub(r"[^\w.+]+", "-", word).strip("-") for word in varied)
        given = (*combination, f"run_dir={Path(parent) / name}")
        if (config := faults.of(load, given, config_dir)) is not None:
            found.append(Job(name, given, config))
    faults.end()
    names = [job.name for job in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    refuse(twice is not None, f"Two runs of the sweep are {twice}: leave one of the values out.")
    return found


def check(found: Sequence[Job]) -> None:
    """Check every run that is left as its own command would, once for those that differ by their
    seed alone. A launcher checks its own. Raises UserError with all faults."""
    from rlcore.commands import start_checks  # imports torch and Ray

    faults, seen = Faults(), set[str]()
    for job in found:
        given = job.config.model_copy(update={"seed": 0, "run_dir": ""})
        if job.finished or job.config.cluster.launch.kind in ELSEWHERE or repr(given) in seen:
            continue
        seen.add(repr(given))
        # as the sweep resumes it
        faults.of(start_checks.check, job.config.model_copy(update={"resume": "auto"}))
    faults.end()


def sweep(
    found: Sequence[Job],
    config_dir: str | None,
    *,
    dry_run: bool,
    warm: bool = False,
    start: Start | None = None,
) -> int:
    """Do the runs one after another, or submit each where `cluster.launch` names a scheduler.

    Runs that have finished are skipped, others are resumed. With `warm`, processes of runs on this
    machine's CPUs are forks of one that has their imports. Returns 0 if all have finished or were
    submitted, 1 if one failed, 130 if the sweep was stopped.
    """
    check(found)
    if dry_run:
        for job in found:
            print(f"{job.name}: {'finished' if job.finished else 'rlcore train'} {_shown(job)}")
        return 0
    folder = found[0].folder.parent
    after_s = found[0].config.takeover_after_s
    with _ended_by_sigterm(), own(folder, "rlcore sweep", takeover_after_s=after_s) as owner:
        if owner.news:
            print(owner.news)
        if not warm or sum(on_cpus_here(job.config) for job in found if not job.finished) < 2:
            return _sweep(found, config_dir, start or _start)
        with TemporaryDirectory(prefix="rlcore-") as made, Nursery(Path(made), IMPORTS):
            return _sweep(found, config_dir, start or _start)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end the sweep between its runs, as Ctrl-C does: the folder is given back, and
    imports that are loading end, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def on_cpus_here(config: RunConfig) -> bool:
    """True for a run whose processes may be forks: none has a GPU, an engine of the user's own, or
    is on another machine."""
    cpus = config.learner.device == "cpu" and all(a.on_cpu for a in config.actor.values())
    usual = {actor.engine for actor in config.actor.values()} == {"vllm"}
    here = config.cluster.launch.kind == "local" and joined_address(config.cluster.address) is None
    return cpus and usual and here


def _sweep(found: Sequence[Job], config_dir: str | None, start: Start) -> int:
    states: dict[str, State] = {}
    for number, job in enumerate(found, 1):
        print(f"rlcore sweep: run {number} of {len(found)}: {job.name}", flush=True)
        states[job.name] = _do(job, config_dir, start)
        if states[job.name] == "stopped":
            break
    print("\n".join(f"{name}: {state}" for name, state in states.items()))
    _report(found)
    if "stopped" in states.values():
        print("stopped: the same command goes on with the sweep")
        return STOPPED
    return 1 if "failed" in states.values() else 0


def _do(job: Job, config_dir: str | None, start: Start) -> State:
    if job.finished:
        return "finished"
    spec = job.config.cluster.launch
    words = [*job.words, *([f"config_dir={config_dir}"] if config_dir else [])]
    if spec.kind in ELSEWHERE:
        return _submit(job, words)
    code = start(render(spec, words, job.config.run_dir).command)
    if code == STOPPED:
        return "stopped"
    return "failed" if code else "finished"


def _submit(job: Job, words: Sequence[str]) -> State:
    mark = job.folder / SUBMITTED
    if job.queued:
        print(f"{job.name} was submitted before; if its job is gone, remove {mark}")
        return "submitted"
    try:
        launch(job.config, words, dry_run=False)
    except (StageError, UserError, OSError) as e:
        print(f"{job.name}: {e}")
        return "failed"
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    return "submitted"


def _start(command: Sequence[str]) -> int:
    """Run one job and wait for it. A signal to the sweep is passed on, so that the run ends with a
    checkpoint."""
    # The environment of this command has it, its PATH perhaps not.
    words = list(command)
    if command[0] == "rlcore":
        words = [*python_words(), "-m", "rlcore.cli", *command[1:]]
    # A session of its own: Ctrl-C would otherwise reach the run twice, and the second one kills.
    process = subprocess.Popen(words, start_new_session=True)
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        process.send_signal(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return STOPPED if stopped else code


def _report(found: Sequence[Job]) -> None:
    """report.html over all runs that have taken a step, next to their folders."""
    begun = [str(job.folder) for job in found if (job.folder / "metrics.jsonl").exists()]
    if begun:
        from_room("report")(begun, str(found[0].folder.parent / "report.html"))


def _shown(job: Job) -> str:
    return " ".join(job.words)
