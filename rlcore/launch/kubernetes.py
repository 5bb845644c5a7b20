"""Kubernetes: a KubeRay RayJob whose nodes run an image of docker/ and share a volume for the run directory."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from rlcore.errors import UserError
from rlcore.launch.settings import (
    ACTOR_RESOURCE,
    LEARNER_RESOURCE,
    RESOURCE_AMOUNT,
    TEMPLATES,
    LaunchSettings,
    Rendered,
    train_command,
)

HEAD_CPUS, HEAD_MEMORY_GIB = 4, 16  # controller, buffer and graders


def render_kubernetes(settings: LaunchSettings, words: Sequence[str], run_dir: str) -> Rendered:
    """`kubectl apply` and its manifest, filled into launchers/rayjob.yaml. Raises UserError for what is missing."""
    s = settings
    _check(s, run_dir)
    manifest = yaml.safe_load((TEMPLATES / "rayjob.yaml").read_text())
    manifest["metadata"] |= {"name": job_name(run_dir), "namespace": s.namespace}
    spec = manifest["spec"]
    spec["entrypoint"] = shlex.join(train_command(words))
    spec["backoffLimit"] = s.retries
    cluster = spec["rayClusterSpec"]
    cluster["rayVersion"] = version("ray")
    cluster["headGroupSpec"]["template"] = _pod(s, HEAD_CPUS, HEAD_MEMORY_GIB, gpus=0)
    cluster["workerGroupSpecs"] = [_workers(s, *group) for group in _groups(s)]
    # Beside the working directory, not in run_dir: that one lies on the volume, which this machine may not see.
    path = f"launch/{job_name(run_dir)}.yaml"
    return Rendered(("kubectl", "apply", "-f", path), {path: yaml.safe_dump(manifest, sort_keys=False)})


def job_name(run_dir: str) -> str:
    """A name that Kubernetes accepts (RFC 1123, at most 47 characters for a RayJob)."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(run_dir).name.lower()).strip("-")
    return f"rlcore-{name or 'run'}"[:47].rstrip("-")


def _check(s: LaunchSettings, run_dir: str) -> None:
    for key in ("image", "claim", "memory_gib_per_node"):
        if getattr(s, key) is None:
            raise UserError(f"cluster.launch.{key} is missing: cluster.launch.kind=kubernetes needs it.")
    if not PurePosixPath(run_dir).is_relative_to(s.mount):
        raise UserError(
            f"run_dir={run_dir} lies outside cluster.launch.mount={s.mount}, where the volume is: it would be lost with"
            f" its pod; choose a run_dir under {s.mount}."
        )


def _groups(s: LaunchSettings) -> list[tuple[str, int, str | None]]:
    """(name, replicas, custom resource) of the worker groups."""
    if not s.learner_nodes:
        return [("nodes", s.nodes, None)]
    return [
        ("learner", s.learner_nodes, LEARNER_RESOURCE),
        ("actors", s.nodes - s.learner_nodes, ACTOR_RESOURCE),
    ]


def _workers(s: LaunchSettings, name: str, replicas: int, resource: str | None) -> dict[str, Any]:
    params = {"disable-usage-stats": "true"}
    if resource is not None:  # KubeRay puts the value into a shell command: JSON, quoted twice
        params["resources"] = json.dumps(json.dumps({resource: RESOURCE_AMOUNT}))
    memory = s.memory_gib_per_node
    assert memory is not None
    return {
        "groupName": name,
        "replicas": replicas,
        "minReplicas": replicas,
        "maxReplicas": replicas,
        "rayStartParams": params,
        "template": _pod(s, s.cpus_per_node, memory, s.gpus_per_node),
    }


def _pod(s: LaunchSettings, cpus: int, memory_gib: int, gpus: int) -> dict[str, Any]:
    amounts: dict[str, Any] = {"cpu": str(cpus), "memory": f"{memory_gib}Gi"}
    if gpus:
        amounts["nvidia.com/gpu"] = gpus
    container: dict[str, Any] = {
        "name": "rlcore",
        "image": s.image,
        "resources": {"requests": amounts, "limits": dict(amounts)},
        "env": [{"name": name, "value": value} for name, value in s.env.items()],
        "volumeMounts": [{"name": "run", "mountPath": s.mount}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    if s.secret is not None:
        container["envFrom"] = [{"secretRef": {"name": s.secret}}]
    return {
        "spec": {
            "containers": [container],
            "nodeSelector": dict(s.node_selector),
            "terminationGracePeriodSeconds": s.grace_s,
            "volumes": [
                {"name": "run", "persistentVolumeClaim": {"claimName": s.claim}},
                # Ray's object store lives in shared memory; the default of a container is 64 MiB.
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{max(1, memory_gib // 3)}Gi"}},
            ],
        }
    }
