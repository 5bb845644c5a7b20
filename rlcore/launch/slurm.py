"""Slurm: one batch script that starts Ray over its allocation, drives the run from the first node,
and stops Ray."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rlcore.launch.rendering import TEMPLATES, Rendered, train_command
from rlcore.launch.specs import ACTOR_RESOURCE, LEARNER_RESOURCE, RESOURCE_AMOUNT, LaunchSpec


def render_slurm(spec: LaunchSpec, words: Sequence[str], run_dir: str) -> Rendered:
    """`sbatch` and its script: options and values of this run, then launchers/slurm.sh
    unchanged."""
    path = f"{run_dir}/launch/job.sbatch"
    lines = ["#!/usr/bin/env bash", *_options(spec, run_dir), "", *_values(spec, words)]
    body = (TEMPLATES / "slurm.sh").read_text()
    return Rendered(("sbatch", path), {path: "\n".join(lines) + "\n\n" + body})


def _options(spec: LaunchSpec, run_dir: str) -> list[str]:
    memory = spec.memory_gib_per_node
    options = {
        "job-name": f"rlcore-{Path(run_dir).name}",
        "nodes": spec.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": spec.cpus_per_node,
        **({"gpus-per-node": spec.gpus_per_node} if spec.gpus_per_node else {}),
        **({"mem": f"{memory}G"} if memory else {}),
        "output": f"{run_dir}/launch/slurm-%j.out",
        "open-mode": "append",  # a requeued job continues its log
        # B: to the batch script alone, which passes it on to the run
        "signal": f"B:TERM@{spec.grace_s}",
        **spec.sbatch,
    }
    return [f"#SBATCH --{name}={value}" for name, value in options.items()] + ["#SBATCH --requeue"]


def _values(spec: LaunchSpec, words: Sequence[str]) -> list[str]:
    exports = [f"export {name}={shlex.quote(value)}" for name, value in spec.env.items()]
    # The programs of the environment that rendered this script: the nodes share its file system.
    programs = shlex.quote(str(Path(sys.executable).parent))
    counts = {
        "cpus": spec.cpus_per_node,
        "gpus": spec.gpus_per_node,
        "learner_nodes": spec.learner_nodes,
        "start_timeout_s": spec.start_timeout_s,
        "grace_s": spec.grace_s,
        "retries": spec.retries,
    }
    return [
        *exports,
        f'export PATH={programs}:"$PATH"',
        *spec.setup,
        f"command=({shlex.join(train_command(words))})",
        " ".join(f"{name}={value}" for name, value in counts.items()),
        f"learner_resources={shlex.quote(json.dumps({LEARNER_RESOURCE: RESOURCE_AMOUNT}))}",
        f"actor_resources={shlex.quote(json.dumps({ACTOR_RESOURCE: RESOURCE_AMOUNT}))}",
    ]
