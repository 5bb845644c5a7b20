"""A wheel is the whole program: outside a checkout it composes runs and renders jobs."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from timing import deadline

ROOT = Path(__file__).resolve().parents[1]
BUILT_FROM = (
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "rlcore",
    "configs",
    "launchers",
)
MAIN = (
    "import rlcore, sys; print(rlcore.__path__[0]); from rlcore.cli import main; sys.exit(main())"
)


def run(*command, cwd, **env):
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=deadline(300),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.processes
def test_a_wheel_runs_outside_a_checkout(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in BUILT_FROM:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    build = [
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
    ]  # as `make wheel`
    run(*build, tmp_path, source, cwd=tmp_path)
    (wheel,) = tmp_path.glob("rlcore-*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    shutil.rmtree(source)
    words = ["train", "experiment=quickstart", "dry_run=true", f"run_dir={tmp_path / 'run'}"]
    told = run("-c", MAIN, *words, cwd=tmp_path, PYTHONPATH=str(site), PATH="/usr/bin:/bin")
    assert told.splitlines()[0] == str(site / "rlcore") and "64 prompts x 8 samples" in told
    shipped = {p.relative_to(site / "rlcore" / "shipped") for p in site.rglob("shipped/*/**/*.*")}
    folders = (ROOT / name for name in ("configs", "launchers"))
    here = {p.relative_to(ROOT) for folder in folders for p in folder.rglob("*.*")}
    assert shipped == here
