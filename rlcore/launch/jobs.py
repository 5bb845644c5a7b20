"""The jobs of a run folder: what Slurm was given, kept in `launch/jobs.jsonl`, and the RayJob that
Kubernetes has of it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlcore.errors import StageError, UserError
from rlcore.spec import refuse

FILE = "launch/jobs.jsonl"
LOG = re.compile(r"(.*)/launch/slurm-\d+\.out")
ENDED = "ENDED"  # of a job that Slurm has forgotten
_ENDS = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY")
OVER = (*_ENDS, "PREEMPTED", "TIMEOUT", ENDED)
ANSWER_S = 60.0  # deadline of a question to Slurm or Kubernetes
RAY_JOB_ENDED = ("Complete", "Failed", "ValidationFailed")  # KubeRay's JobDeploymentStatus
DELETED_S = 300.0


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job as Slurm shows it.

    Example: SlurmJob("42", "RUNNING", "None", "n[1-2]", "1", "/data/run")
    """

    id: str
    state: str
    reason: str
    nodes: str
    restarts: str
    run_dir: str

    @property
    def over(self) -> bool:
        return self.state in OVER

    def joined(self, part: SlurmJob) -> SlurmJob:
        """The job with another of its parts, each a job to Slurm. It is over once all parts are."""
        shown = part if self.over and not part.over else self
        nodes = ",".join(filter(None, (self.nodes, part.nodes)))
        return replace(shown, nodes=nodes, run_dir=self.run_dir)


def keep(run_dir: str, job: str, submitted: str) -> None:
    """Note a job that was taken. `submitted`: the time, in ISO 8601."""
    with (Path(run_dir) / FILE).open("a") as file:
        file.write(json.dumps({"id": job, "submitted": submitted}) + "\n")


def kept(run_dir: str) -> list[str]:
    """The ids of a folder's jobs, the newest last."""
    try:
        lines = (Path(run_dir) / FILE).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [str(json.loads(line)["id"]) for line in lines]


def known(ids: Sequence[str] | None = None) -> list[SlurmJob]:
    """The jobs of these ids, or every job of `rlcore launch` that Slurm still knows."""
    shown = _run(["scontrol", "show", "job", "--oneliner", "--all"]).stdout.splitlines()
    found: dict[str, SlurmJob] = {}
    for job in filter(None, map(_read, shown)):
        first = found.get(job.id)
        found[job.id] = job if first is None else first.joined(job)
    if ids is None:
        return list(found.values())
    return [found.get(i, SlurmJob(i, ENDED, "", "", "", "")) for i in ids]


def _read(line: str) -> SlurmJob | None:
    """A job from a line of scontrol's; None for one that rlcore did not launch."""
    value = dict(re.findall(r"(?:^| )(\w+)=(.*?)(?= \w+=|$)", line))
    log = LOG.fullmatch(value.get("StdOut", ""))
    if log is None:
        return None
    names = ("JobState", "Reason", "NodeList", "Restarts")
    state, reason, nodes, restarts = (value.get(name, "") for name in names)
    job = value.get("HetJobId") or value.get("JobId", "")
    return SlurmJob(job, state, reason, nodes, restarts, log[1])


def refuse_another(run_dir: str) -> None:
    """Raise UserError if a job of the folder waits or runs."""
    ids = kept(run_dir)
    for job in known(ids) if ids else []:
        refuse(
            not job.over,
            f"run_dir={run_dir} has job {job.id} already ({job.state}): wait for it, end it with "
            f"`rlcore cancel {shlex.quote(f'run_dir={run_dir}')}`, or choose another folder.",
        )


def cancel(job: SlurmJob) -> None:
    """End a job: a running one after a checkpoint, for which it has as long as it needs."""
    # to the batch script alone, which tells the run; scancel without it allows Slurm's KillWait
    told = ["--batch", "--signal=TERM"] if job.state == "RUNNING" else []
    done = _run(["scancel", *told, job.id])
    if done.returncode:
        raise StageError(f"scancel refused job {job.id}: {done.stderr.strip()}")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    except FileNotFoundError as error:
        raise UserError(
            f"This machine has no {command[0]}: ask for Slurm's jobs where sbatch is."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise StageError(f"{command[0]} did not answer within {ANSWER_S:g} s") from error


def make_room(namespace: str, name: str, run_dir: str) -> None:
    """Delete the folder's RayJob if it has ended, since applying it again would start nothing.

    Raises UserError if it waits or runs, StageError if kubectl gives no answer.
    """
    where = ["rayjob", name, f"--namespace={namespace}"]
    shown = _kubectl(["get", *where, "--ignore-not-found", "--output=json"], ANSWER_S)
    if not shown.strip():
        return
    state = json.loads(shown).get("status", {}).get("jobDeploymentStatus", "") or "New"
    refuse(
        state not in RAY_JOB_ENDED,
        f"run_dir={run_dir} has RayJob {name} already ({state}): wait for it, end it with "
        f"`kubectl delete {' '.join(where)}`, or choose another folder.",
    )
    _kubectl(["delete", *where, f"--timeout={DELETED_S:g}s"], DELETED_S + ANSWER_S)


def _kubectl(words: list[str], limit_s: float) -> str:
    try:
        done = subprocess.run(["kubectl", *words], capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise StageError(f"kubectl {words[0]} did not answer within {limit_s:g} s") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise StageError(f"kubectl {words[0]}: {said[-1] if said else done.returncode}")
    return done.stdout
