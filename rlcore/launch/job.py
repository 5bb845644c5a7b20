"""The jobs of launchers: files and commands for Slurm, Kubernetes, Ray and this machine, printed
(dry run) or started."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from rlcore.errors import StageError, UserError
from rlcore.files import shipped
from rlcore.launch import jobs
from rlcore.launch.specs import (
    ACTOR_RESOURCE,
    ELSEWHERE,
    LEARNER_RESOURCE,
    RESOURCE_AMOUNT,
    JobPart,
    LaunchSpec,
    NodeSize,
)
from rlcore.spec import refuse

TEMPLATES = shipped("launchers")
# KubeRay gives the head's service these ports only where the container names none: with one more,
# such as that of metrics, workers would not find Ray, nor KubeRay the job server.
HEAD_PORTS = {
    "gcs-server": 6379,
    "dashboard": 8265,
    "client": 10001,
    "metrics": 8080,
    "serve": 8000,
}


@dataclass(frozen=True, slots=True)
class Rendered:
    """The files (content by path) to write first, and the one command to start then.

    Example: Rendered(("sbatch", "run/launch/job.sbatch"), {"run/launch/job.sbatch": "#!..."})
    """

    command: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """The files and the command as readable text, in order."""
        parts = [f"# {path}\n{content.rstrip()}\n" for path, content in self.files.items()]
        return "\n".join([*parts, f"# command\n{shlex.join(self.command)}\n"])


def train_command(words: Sequence[str], *, elsewhere: bool = False) -> list[str]:
    """`rlcore train` with the words given; a run that exists already is resumed. `elsewhere`: a
    scheduler may repeat it on another host, after the first was lost."""
    # Schedulers repeat the command: without it the second start would refuse the run directory.
    added = {"resume": "auto"} | ({"takeover_after_s": "60"} if elsewhere else {})
    given = {word.partition("=")[0] for word in words}
    return ["rlcore", "train", *words, *(f"{k}={v}" for k, v in added.items() if k not in given)]


def render_slurm(spec: LaunchSpec, words: Sequence[str], run_dir: str) -> Rendered:
    """`sbatch` and its script: options and values of this run, then launchers/slurm.sh
    unchanged."""
    path = f"{run_dir}/launch/job.sbatch"
    lines = ["#!/usr/bin/env bash", *_options(spec, run_dir), "", *_values(spec, words, run_dir)]
    body = (TEMPLATES / "slurm.sh").read_text()
    return Rendered(("sbatch", path), {path: "\n".join(lines) + "\n\n" + body})


def _options(spec: LaunchSpec, run_dir: str) -> list[str]:
    first, *others = spec.parts
    options = {
        "job-name": f"rlcore-{Path(run_dir).name}",
        "output": f"{run_dir.replace('%', '%%')}/launch/slurm-%j.out",
        "open-mode": "append",  # a requeued job continues its log
        # B: to the batch script alone; TERM comes from scancel, which wants no requeue
        "signal": f"B:USR1@{spec.grace_s}",
        "requeue": "",
        # the run goes on when a node of actors alone is lost
        **({"no-kill": ""} if spec.least_nodes and not others else {}),
        **_part_options(first),
    }
    lines = _lines(options)
    for part in others:
        lines += ["#SBATCH hetjob", *_lines(_part_options(part))]
    return lines


def _part_options(part: JobPart) -> dict[str, Any]:
    memory = part.size.memory_gib
    # a node that the job has alone gives it all its memory, not Slurm's default for each CPU
    amount = f"{memory}G" if memory else "0" if "exclusive" in part.sbatch else ""
    return {
        "nodes": part.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": part.size.cpus,
        **({"gpus-per-node": part.size.gpus} if part.size.gpus else {}),
        **({"mem": amount} if amount else {}),
        **part.sbatch,
    }


def _lines(options: Mapping[str, object]) -> list[str]:
    return [f"#SBATCH --{name}{_given(value)}" for name, value in options.items()]


def _given(value: object) -> str:
    """The value of an option as sbatch reads it in a script, as a shell would; "" for a flag."""
    return f"={shlex.quote(str(value))}" if str(value) else ""


def _values(spec: LaunchSpec, words: Sequence[str], run_dir: str) -> list[str]:
    inside, across = _container_words(spec)
    exports = [f"export {name}={shlex.quote(value)}" for name, value in spec.env.items()]
    # The programs of the environment that rendered this script: the nodes share its file system.
    programs = shlex.quote(str(Path(sys.executable).parent))
    path = [] if spec.container_image else [f'export PATH={programs}:"$PATH"']
    sizes = [part.size for part in spec.parts]
    counts = {
        "cpus": f"({' '.join(str(size.cpus) for size in sizes)})",
        "gpus": f"({' '.join(str(size.gpus) for size in sizes)})",
        "learner_nodes": spec.learner_nodes,
        "start_timeout_s": spec.start_timeout_s,
        "retries": spec.retries,
        "least": spec.least_nodes,
        "interface": shlex.quote(spec.interface or ""),
    }
    return [
        *exports,
        *path,
        *spec.setup,
        # before a command on this node, and words of srun before one on another
        f"inside=({inside})",
        f"across=({across})",
        f"command=({shlex.join(train_command(words, elsewhere=True))})",
        f"run_dir={shlex.quote(run_dir)}",
        " ".join(f"{name}={value}" for name, value in counts.items()),
        f"learner_resources={shlex.quote(json.dumps({LEARNER_RESOURCE: RESOURCE_AMOUNT}))}",
        f"actor_resources={shlex.quote(json.dumps({ACTOR_RESOURCE: RESOURCE_AMOUNT}))}",
    ]


def _container_words(spec: LaunchSpec) -> tuple[str, str]:
    """Shell words that precede a command of the first node, and words that follow `srun` for a
    command of another node."""
    image = spec.container_image
    if image is None:
        return "", ""
    if spec.container_runtime == "apptainer":
        # /tmp and /dev/shm of the host, where Ray has its sockets and objects, are in it anyway
        bind = ["--bind", ",".join(spec.container_mounts)] if spec.container_mounts else []
        gpus = ["--nv"] if any(part.size.gpus for part in spec.parts) else []
        run = shlex.join(["apptainer", "exec", *gpus, *bind, image])
        return run, run
    mounts = ",".join(["/tmp:/tmp", *spec.container_mounts])
    words = shlex.join([f"--container-image={image}", f"--container-mounts={mounts}"])
    # pyxis is a plugin of srun: the first node's commands are job steps, too, and share the node
    step = 'srun --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME"'
    return f"{step} {words}", words


def render_kubernetes(spec: LaunchSpec, words: Sequence[str], run_dir: str) -> Rendered:
    """`kubectl apply` and its manifest, from launchers/rayjob.yaml.

    Raises UserError for a setting that is missing or does not fit.
    """
    _check(spec, run_dir)
    manifest = yaml.safe_load((TEMPLATES / "rayjob.yaml").read_text())
    manifest["metadata"] |= {"name": job_name(run_dir), "namespace": spec.namespace}
    manifest["metadata"]["labels"] |= spec.labels
    job = manifest["spec"]
    job["entrypoint"] = shlex.join(train_command(words, elsewhere=True))
    job["backoffLimit"] = spec.retries
    cluster = job["rayClusterSpec"]
    cluster["rayVersion"] = version("ray")
    cluster["headGroupSpec"]["template"] = _pod(
        spec, NodeSize(spec.head_cpus, spec.head_memory_gib, gpus=0), HEAD_PORTS
    )
    cluster["workerGroupSpecs"] = [_workers(spec, *group) for group in _groups(spec)]
    # Below the working directory, not in run_dir: that is on the volume, which this machine may not
    # see.
    path = f"launch/{job_name(run_dir)}.yaml"
    return Rendered(
        ("kubectl", "apply", "-f", path), {path: yaml.safe_dump(manifest, sort_keys=False)}
    )


def job_name(run_dir: str) -> str:
    """The RayJob of a user's run folder: the same at every launch, and no other folder's or user's.
    Kubernetes accepts it (RFC 1123, at most 47 characters for a RayJob)."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in containers
        user = str(os.getuid())
    mark = hashlib.sha256(f"{user}\n{run_dir}".encode()).hexdigest()[:6]
    return "-".join(["rlcore", _label(user, 10), _label(Path(run_dir).name, 22), mark])


def _label(text: str, most: int) -> str:
    """Lower-case letters, digits and single hyphens between them, at least one character."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:most].rstrip("-") or "x"


def with_metrics_port(spec: LaunchSpec, port: int) -> LaunchSpec:
    """The settings with the port of the run's metrics in every pod, for launchers/podmonitor.yaml;
    `cluster.launch.pod` may give it another number."""
    named = {"spec": {"containers": [{"ports": [{"name": "rlcore", "containerPort": port}]}]}}
    return spec.model_copy(update={"pod": _merged(named, spec.pod)})


def _check(spec: LaunchSpec, run_dir: str) -> None:
    """Refuse missing or unsuitable settings."""
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


def _groups(spec: LaunchSpec) -> list[tuple[str, int, str | None]]:
    """(name, replicas, custom resource) of the worker groups."""
    if not spec.learner_nodes:
        return [("nodes", spec.nodes, None)]
    return [
        ("learner", spec.learner_nodes, LEARNER_RESOURCE),
        ("actors", spec.nodes - spec.learner_nodes, ACTOR_RESOURCE),
    ]


def _workers(spec: LaunchSpec, name: str, replicas: int, resource: str | None) -> dict[str, Any]:
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
        "template": _pod(spec, spec.node(of_learner=resource == LEARNER_RESOURCE)),
    }


def _pod(
    spec: LaunchSpec, node: NodeSize, ports: Mapping[str, int] | None = None
) -> dict[str, Any]:
    # Ray's object store lives in shared memory, of which a container has 64 MiB by default.
    assert node.memory_gib is not None
    shared_memory = {"medium": "Memory", "sizeLimit": f"{max(1, node.memory_gib // 3)}Gi"}
    pod: dict[str, Any] = {
        "containers": [_container(spec, node)],
        "nodeSelector": dict(spec.node_selector),
        "terminationGracePeriodSeconds": spec.grace_s,
        "volumes": [
            {"name": "run", "persistentVolumeClaim": {"claimName": spec.claim}},
            {"name": "shm", "emptyDir": shared_memory},
        ],
    }
    if ports:
        listed = [{"name": name, "containerPort": port} for name, port in ports.items()]
        pod["containers"][0]["ports"] = listed
    if spec.fs_group is not None:
        pod["securityContext"] = {"fsGroup": spec.fs_group}
    if spec.tolerations:
        pod["tolerations"] = [dict(toleration) for toleration in spec.tolerations]
    if spec.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in spec.image_pull_secrets]
    template: dict[str, Any] = _merged({"spec": pod}, spec.pod)
    return template


def _merged(base: Any, more: Any, of: str = "") -> Any:
    """`base` with what `more` adds or replaces, both of the key `of`. Items of lists are merged by
    their names, containers without one into the only one there is; others are appended."""
    if isinstance(base, Mapping) and isinstance(more, Mapping):
        both = {key: _merged(base[key], more[key], key) for key in base.keys() & more.keys()}
        return {**base, **more, **both}
    if not (isinstance(base, list) and isinstance(more, list)):
        return more
    found = list(base)
    for item in more:
        name = item.get("name") if isinstance(item, Mapping) else None
        places = [i for i, old in enumerate(base) if name and old.get("name") == name]
        if of == "containers" and name is None and len(base) == 1:
            places = [0]
        if places:
            found[places[0]] = _merged(found[places[0]], item)
        else:
            found.append(item)
    return found


def _container(spec: LaunchSpec, node: NodeSize) -> dict[str, Any]:
    amounts: dict[str, Any] = {"cpu": str(node.cpus), "memory": f"{node.memory_gib}Gi"}
    if node.gpus:
        amounts["nvidia.com/gpu"] = node.gpus
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


def _local(spec: LaunchSpec, words: Sequence[str], run_dir: str) -> Rendered:
    return Rendered(tuple(train_command(words)))


def _ray(spec: LaunchSpec, words: Sequence[str], run_dir: str) -> Rendered:
    """A job of the cluster's own job server, or a driver on this machine, which must then be part
    of the cluster."""
    command = train_command(words)
    if spec.job_address is None:
        return Rendered(tuple(command))
    return Rendered(("ray", "job", "submit", f"--address={spec.job_address}", "--", *command))


LAUNCHERS: Mapping[str, Callable[[LaunchSpec, Sequence[str], str], Rendered]] = {
    "local": _local,
    "ray": _ray,
    "slurm": render_slurm,
    "kubernetes": render_kubernetes,
}


def render(spec: LaunchSpec, words: Sequence[str], run_dir: str) -> Rendered:
    """Render the job of `rlcore train WORDS`. Raises UserError naming the key that does not fit."""
    refuse(
        spec.learner_nodes >= spec.nodes,
        f"cluster.launch.learner_nodes={spec.learner_nodes} leaves no node of "
        f"cluster.launch.nodes={spec.nodes} for actors; choose fewer, or 0 to share all nodes.",
    )
    return LAUNCHERS[spec.kind](spec, words, run_dir)


def launch(spec: LaunchSpec, words: Sequence[str], run_dir: str, *, dry_run: bool = False) -> int:
    """Start `rlcore train WORDS` where the specification says; with `dry_run` only print what would
    be started.

    Returns the exit code of the launcher's command. Raises UserError if something does not fit or
    the launcher's program is not installed here, StageError if the program refuses the job.
    """
    rendered = render(spec, words, run_dir)
    if dry_run:
        print(rendered.text(), end="")
        return 0
    for path, content in rendered.files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(content)
    program, *more = rendered.command
    slurm = spec.kind == "slurm"
    command = [program, *(["--parsable"] if slurm else []), *more]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE if slurm else None, text=True)
    except FileNotFoundError as error:
        raise UserError(
            f"cluster.launch.kind={spec.kind} needs the program '{program}', which this machine "
            "lacks: launch from one that has it, or add dry_run=true to see what would be started."
        ) from error
    # The other kinds run the training itself: its exit code is the answer.
    if done.returncode and spec.kind in ELSEWHERE:
        raise StageError(f"{program} did not accept the job (exit code {done.returncode})")
    if slurm:
        job = done.stdout.strip().partition(";")[0]  # a cluster's name may follow
        jobs.keep(run_dir, job, datetime.now(UTC).isoformat(timespec="seconds"))
        print(f"Submitted batch job {job}: rlcore jobs run_dir={run_dir}")
    return done.returncode
