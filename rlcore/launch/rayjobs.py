"""The RayJob that Kubernetes has of a run folder."""

from __future__ import annotations

import json
import subprocess

from rlcore.errors import StageError
from rlcore.spec import refuse

ENDED = ("Complete", "Failed", "ValidationFailed")  # KubeRay's JobDeploymentStatus
ANSWER_S = 60.0
DELETED_S = 300.0


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
        state not in ENDED,
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
