"""Kubernetes: a KubeRay RayJob whose nodes run an image of docker/ and share a volume for the run
directory."""

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
from rlcore.launch.rendering import TEMPLATES, Rendered, train_command
from rlcore.launch.specs import ACTOR_RESOURCE, LEARNER_RESOURCE, RESOURCE_AMOUNT, LaunchSpec
from rlcore.spec import refuse

# Of the head's pod, which holds the controller, the buffer and the graders.
HEAD_CPUS = 4
HEAD_MEMORY_GIB = 16


def render_kubernetes(spec: LaunchSpec, words: Sequence[str], run_dir: str) -> Rendered:
    """`kubectl apply` and its manifest, from launchers/rayjob.yaml.

    Raises UserError for a setting that is missing or does not fit.
    """
    memory = _check(spec, run_dir)
    manifest = yaml.safe_load((TEMPLATES / "rayjob.yaml").read_text())
    manifest["metadata"] |= {"name": job_name(run_dir), "namespace": spec.namespace}
    job = manifest["spec"]
    job["entrypoint"] = shlex.join(train_command(words))
    job["backoffLimit"] = spec.retries
    cluster = job["rayClusterSpec"]
    cluster["rayVersion"] = version("ray")
    cluster["headGroupSpec"]["template"] = _pod(spec, HEAD_CPUS, HEAD_MEMORY_GIB, gpus=0)
    cluster["workerGroupSpecs"] = [_workers(spec, memory, *group) for group in _groups(spec)]
    # Below the working directory, not in run_dir: that is on the volume, which this machine may not
    # see.
    path = f"launch/{job_name(run_dir)}.yaml"
    return Rendered(
        ("kubectl", "apply", "-f", path), {path: yaml.safe_dump(manifest, sort_keys=False)}
    )


def job_name(run_dir: str) -> str:
    """A name that Kubernetes accepts (RFC 1123, at most 47 characters for a RayJob)."""
    # KubeRay appends up to 16 characters to it for the names of its pods.
    name = re.sub(r"[^a-z0-9]+", "-", Path(run_dir).name.lower()).strip("-")
    return f"rlcore-{name or 'run'}"[:47].rstrip("-")


def _check(spec: LaunchSpec, run_dir: str) -> int:
    """Refuse missing or unsuitable settings. Returns the memory of a node in GiB."""
    needed = {key: getattr(spec, key) for key in ("image", "claim", "memory_gib_per_node")}
    for key, value in needed.items():
        if value is None:
            raise UserError(
                f"cluster.launch.{key} is missing: cluster.launch.kind=kubernetes needs it."
            )
    refuse(
        not PurePosixPath(run_dir).is_relative_to(spec.mount),
        f"run_dir={run_dir} lies outside cluster.launch.mount={spec.mount}, where the volume is: "
        f"it would be lost with its pod; choose a run_dir under {spec.mount}.",
    )
    return int(needed["memory_gib_per_node"])


def _groups(spec: LaunchSpec) -> list[tuple[str, int, str | None]]:
    """(name, replicas, custom resource) of the worker groups."""
    if not spec.learner_nodes:
        return [("nodes", spec.nodes, None)]
    return [
        ("learner", spec.learner_nodes, LEARNER_RESOURCE),
        ("actors", spec.nodes - spec.learner_nodes, ACTOR_RESOURCE),
    ]


def _workers(
    spec: LaunchSpec, memory_gib: int, name: str, replicas: int, resource: str | None
) -> dict[str, Any]:
    params = {"disable-usage-stats": "true"}
    if resource is not None:
        # KubeRay puts the value into a shell command: JSON, quoted twice.
        params["resources"] = json.dumps(json.dumps({resource: RESOURCE_AMOUNT}))
    return {
        "groupName": name,
        "replicas": replicas,
        "minReplicas": replicas,
        "maxReplicas": replicas,
        "rayStartParams": params,
        "template": _pod(spec, spec.cpus_per_node, memory_gib, spec.gpus_per_node),
    }


def _pod(spec: LaunchSpec, cpus: int, memory_gib: int, gpus: int) -> dict[str, Any]:
    # Ray's object store lives in shared memory, of which a container has 64 MiB by default.
    shared_memory = {"medium": "Memory", "sizeLimit": f"{max(1, memory_gib // 3)}Gi"}
    return {
        "spec": {
            "containers": [_container(spec, cpus, memory_gib, gpus)],
            "nodeSelector": dict(spec.node_selector),
            "terminationGracePeriodSeconds": spec.grace_s,
            "volumes": [
                {"name": "run", "persistentVolumeClaim": {"claimName": spec.claim}},
                {"name": "shm", "emptyDir": shared_memory},
            ],
        }
    }


def _container(spec: LaunchSpec, cpus: int, memory_gib: int, gpus: int) -> dict[str, Any]:
    amounts: dict[str, Any] = {"cpu": str(cpus), "memory": f"{memory_gib}Gi"}
    if gpus:
        amounts["nvidia.com/gpu"] = gpus
    container: dict[str, Any] = {
        "name": "rlcore",
        "image": spec.image,
        "resources": {"requests": amounts, "limits": dict(amounts)},
        "env": [{"name": name, "value": value} for name, value in spec.env.items()],
        "volumeMounts": [
            {"name": "run", "mountPath": spec.mount},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if spec.secret is not None:
        container["envFrom"] = [{"secretRef": {"name": spec.secret}}]
    return container
