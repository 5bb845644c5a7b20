"""`rlcore launch`: the checks of `rlcore train`, with the nodes of `cluster.launch` as the cluster,
before a scheduler gets the job. `rlcore jobs` and `rlcore cancel`: the jobs that Slurm got."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from rlcore.commands.node_places import check_idle, placed
from rlcore.config.schema import RunConfig
from rlcore.errors import StageError, UserError
from rlcore.launch import jobs
from rlcore.launch.job import job_name, render, with_metrics_port
from rlcore.launch.job import launch as start
from rlcore.launch.specs import ELSEWHERE
from rlcore.metrics.sinks import read_status
from rlcore.spec import refuse

NO_SLURM = re.compile(r"configuration source|[Cc]ontact slurm controller|slurm_load_ctl_conf|munge")
TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def launch(config: RunConfig, words: Sequence[str], *, dry_run: bool) -> int:
    """Start the run that `words` describe, after the checks that `rlcore train` makes; with
    `dry_run` only print what would be started. Raises UserError, or StageError for a job that the
    scheduler would not take."""
    spec, run_dir = config.cluster.launch, config.run_dir
    if spec.kind not in ELSEWHERE:
        return start(spec, words, run_dir, dry_run=dry_run)
    if spec.kind == "kubernetes" and config.logging.prometheus_port:
        spec = with_metrics_port(spec, config.logging.prometheus_port)
    rendered = render(spec, words, run_dir)  # refuses first what no node could do
    if not any(word.startswith("resume=") for word in words):
        config = config.model_copy(update={"resume": "auto"})
    lines = [*_check(config)]
    if spec.kind == "slurm":
        _check_time(config)
        jobs.refuse_another(run_dir)
        (script,) = rendered.files.values()
        lines += _asked(script)
    for line in lines:
        print(f"rlcore launch: {line}", file=sys.stderr)
    if spec.kind == "kubernetes" and not dry_run and shutil.which("kubectl"):
        jobs.make_room(spec.namespace, job_name(run_dir), run_dir)
    return start(spec, words, run_dir, dry_run=dry_run)


def _check(config: RunConfig) -> Iterator[str]:
    """Lines on what was seen, and on what could not be."""
    hidden = [*_hidden(config)]
    if hidden:
        yield f"not checked, since this machine does not see them: {', '.join(hidden)}"
    else:
        # imports torch and Ray
        from rlcore.commands.start_checks import check

        check(config)
    found = placed(config)
    yield from map(str, found)
    yield from check_idle(config, found)


def _hidden(config: RunConfig) -> Iterator[str]:
    """The files of a run that are missing here and lie where only the job sees them: below the
    volume of Kubernetes, or in a container."""
    spec = config.cluster.launch
    if spec.kind == "kubernetes":
        inside = [spec.mount]
    else:
        inside = [mount.split(":")[1] for mount in spec.container_mounts if spec.container_image]
    for key, value in _paths(config):
        path = PurePosixPath(value)
        if any(path.is_relative_to(folder) for folder in inside) and not Path(value).exists():
            yield f"{key}={value}"


def _paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(key, value) of the files and folders that a run reads."""
    if config.model.path is not None:
        yield "model.path", config.model.path
    for label, task in config.tasks.items():
        yield from _named(config.task_key(label), task.args)
    for label, evaluated in config.evaluation.tasks.items():
        yield from _named(f"evaluation.tasks.{label}", evaluated.args)


def _named(key: str, args: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in args.items():
        if isinstance(value, str) and value.startswith("/"):
            yield f"{key}.args.{name}", value


def _check_time(config: RunConfig) -> None:
    """Refuse a time limit that leaves no time before the last checkpoint's."""
    spec = config.cluster.launch
    text = spec.sbatch.get("time")
    seconds = None if text is None else limit_s(text)
    refuse(
        seconds is not None and seconds <= spec.grace_s,
        f"cluster.launch.sbatch.time={text} is not more than cluster.launch.grace_s="
        f"{spec.grace_s} s, which are for the last checkpoint: ask for more time, or lower "
        "cluster.launch.grace_s.",
    )


def limit_s(text: str) -> int | None:
    """Seconds of a Slurm time limit: minutes, minutes:seconds, hours:minutes:seconds, days-hours
    and so on. None for another form, such as UNLIMITED, which sbatch judges."""
    found = TIME.fullmatch(text.strip())
    if found is None:
        return None
    days, *parts = (int(part) if part else 0 for part in found.groups())
    given = sum(part is not None for part in found.groups()[1:])
    if found[1] is not None:
        hours, minutes, seconds = parts
    elif given == 1:
        hours, minutes, seconds = 0, parts[0], 0
    elif given == 2:
        hours, minutes, seconds = 0, parts[0], parts[1]
    else:
        hours, minutes, seconds = parts
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _asked(script: str) -> Iterator[str]:
    """Slurm's answer to the job, which it does not take. Raises StageError where it refuses it."""
    if shutil.which("sbatch") is None:
        yield "not asked whether Slurm takes the job, since this machine has no sbatch"
        return
    asked = subprocess.run(
        ["sbatch", "--test-only"], input=script, text=True, capture_output=True, timeout=120
    )
    said = [line.removeprefix("sbatch: ") for line in asked.stderr.strip().splitlines()]
    last = said[-1] if said else f"exit code {asked.returncode}"
    if asked.returncode and NO_SLURM.search(last):
        yield f"not asked whether Slurm takes the job ({last})"
    elif asked.returncode:
        raise StageError(f"sbatch does not take the job: {last}")
    else:
        yield from said


LINE = "{:>8s}  {:<11s} {:<20s} {:<18s} {:>8s} {:>8s}  {}"


def show_jobs(run_dir: str | None) -> int:
    """Print a line for each job: of a folder, or all that Slurm knows."""
    found = jobs.known(_ids(run_dir) if run_dir else None)
    print(LINE.format("id", "state", "reason", "nodes", "step", "restarts", "run_dir"))
    for job in found:
        folder = job.run_dir or run_dir or ""
        values = (job.id, job.state, job.reason, job.nodes, _step(folder), job.restarts, folder)
        print(LINE.format(*values))
    return 0


def cancel_jobs(run_dir: str) -> int:
    """End the queued and running jobs of a folder, with a checkpoint. Raises UserError if none
    does."""
    left = [job for job in jobs.known(_ids(run_dir)) if not job.over]
    if not left:
        raise UserError(f"run_dir={run_dir} has no queued or running job.")
    for job in left:
        jobs.cancel(job)
        print(f"job {job.id} {_answer(job)}")
    return 0


def _answer(job: jobs.SlurmJob) -> str:
    if job.state == "RUNNING":
        return "ends after the present step, with a checkpoint"
    return "is cancelled"


def _ids(run_dir: str) -> list[str]:
    ids = jobs.kept(run_dir)
    if not ids:
        raise UserError(f"run_dir={run_dir} has no job of `rlcore launch`: {jobs.FILE} is missing.")
    return ids


def _step(folder: str) -> str:
    status = read_status(Path(folder)) if folder else None
    return "" if status is None else str(status["step"])
