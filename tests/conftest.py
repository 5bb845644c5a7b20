"""What tests of several packages share."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from timing import deadline

from rlcore.errors import UserError

pytest_plugins = ["tier_plugin"]

# An example's time says nothing of a law: the first one imports, and other programs run beside it.
hypothesis.settings.register_profile("rlcore", deadline=None)
# What decides on a change draws the same examples each time; all other runs look further.
hypothesis.settings.register_profile("settled", deadline=None, derandomize=True)
hypothesis.settings.load_profile("rlcore")

# for clusters that tests start themselves, as those of runs have it
os.environ.setdefault("RAY_worker_niceness", "0")

# where model=smollm2 expects it
SMOLLM2 = Path(__file__).parents[1] / "cache" / "models" / "smollm2-135m"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of a pretrained chat model, SmolLM2-135M-Instruct; made once, then kept."""
    from rlcore.commands.fetch import fetch_model  # imports what only this fixture needs

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
def with_triton(tmp_path) -> Callable[..., str]:
    """Runs a program that imports triton, in a process of its own: vLLM's CPU build, imported by
    other tests of this one, puts a placeholder in triton's place. Returns what it printed."""
    try:
        importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("triton is not installed: `make venv` installs it from requirements/dev.lock")

    def run(program: str, **variables: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "triton"), **variables},
            capture_output=True,
            text=True,
            timeout=deadline(120),
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.strip()

    return run


@pytest.fixture
def under_interpreter(with_triton) -> Callable[[str], None]:
    """Runs a program whose Triton kernels are interpreted. It prints "equal" at its end."""

    def run(program: str) -> None:
        assert with_triton(program, TRITON_INTERPRET="1") == "equal"

    return run
