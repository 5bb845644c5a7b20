"""Slurm: one batch script that starts Ray over its allocation, drives the run from the first node, and stops Ray."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rlcore.launch.settings import (
    ACTOR_RESOURCE,
    LEARNER_RESOURCE,
    RESOURCE_AMOUNT,
    TEMPLATES,
    LaunchSettings,
    Rendered,
    train_command,
)


def render_slurm(settings: LaunchSettings, words: Sequence[str], run_dir: str) -> Rendered:
    """`sbatch` and its script: the options and values of this run, then launchers/slurm.sh as it stands."""
    path = f"{run_dir}/launch/job.sbatch"
    lines = ["#!/usr/bin/env bash", *_options(settings, run_dir), "", *_values(settings, words)]
    body = (TEMPLATES / "slurm.sh").read_text()
    return Rendered(("sbatch", path), {path: "\n".join(lines) + "\n\n" + body})


def _options(s: LaunchSettings, run_dir: str) -> list[str]:
    options = {
        "job-name": f"rlcore-{Path(run_dir).name}",
        "nodes": s.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": s.cpus_per_node,
        **({"gpus-per-node": s.gpus_per_node} if s.gpus_per_node else {}),
        **({"mem": f"{s.memory_gib_per_node}G"} if s.memory_gib_per_node else {}),
        "output": f"{run_dir}/launch/slurm-%j.out",
        "open-mode": "append",
        "signal": f"B:TERM@{s.grace_s}",
        **s.sbatch,
    }
    return [f"#SBATCH --{name}={value}" for name, value in options.items()] + ["#SBATCH --requeue"]


def _values(s: LaunchSettings, words: Sequence[str]) -> list[str]:
    exports = [f"export {name}={shlex.quote(value)}" for name, value in s.env.items()]
    # The programs of the environment that rendered this script, over a file system that the nodes share.
    programs = shlex.quote(str(Path(sys.executable).parent))
    return [
        *exports,
        f'export PATH={programs}:"$PATH"',
        *s.setup,
        f"command=({shlex.join(train_command(words))})",
        f"cpus={s.cpus_per_node} gpus={s.gpus_per_node} learner_nodes={s.learner_nodes}",
        f"start_timeout_s={s.start_timeout_s} grace_s={s.grace_s} retries={s.retries}",
        f"learner_resources={shlex.quote(json.dumps({LEARNER_RESOURCE: RESOURCE_AMOUNT}))}",
        f"actor_resources={shlex.quote(json.dumps({ACTOR_RESOURCE: RESOURCE_AMOUNT}))}",
    ]
