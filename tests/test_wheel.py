"""A wheel is the whole program: outside a checkout it composes runs and renders jobs, and with the
lock it needs nothing else."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from run_documented import blocks
from test_locks import PROJECT, lock, needs
from timing import deadline

ROOT = Path(__file__).resolve().parents[1]
BUILT_FROM = (
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "CHANGELOG.md",
    "CITATION.cff",
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from the source distribution of `make wheel`, whose copy is gone."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in BUILT_FROM:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    run(
        "-c",
        f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})",
        cwd=source,
    )
    shutil.rmtree(source)
    (packed,) = folder.glob("rlcore-*.tar.gz")
    build = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w"]
    run(*build, folder, packed, cwd=folder)
    (found,) = folder.glob("rlcore-*.whl")
    return found


@pytest.mark.processes
def test_a_wheel_runs_outside_a_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    words = ["train", "experiment=quickstart", "dry_run=true", f"run_dir={tmp_path / 'run'}"]
    told = run("-c", MAIN, *words, cwd=tmp_path, PYTHONPATH=str(site), PATH="/usr/bin:/bin")
    assert told.splitlines()[0] == str(site / "rlcore") and "64 prompts x 8 samples" in told
    shipped = {p.relative_to(site / "rlcore" / "shipped") for p in site.rglob("shipped/*/**/*.*")}
    folders = (ROOT / name for name in ("configs", "launchers"))
    here = {p.relative_to(ROOT) for folder in folders for p in folder.rglob("*.*")}
    assert shipped == here


def link(names, site):
    """Put the packages that are installed here into another environment's folder of packages."""
    for name in names:
        for path in distribution(name).files:
            if ".." in path.parts:  # a program of bin/
                continue
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            if not (site / path).exists():
                os.link(path.locate(), site / path)


def closure(texts):
    """Names of the packages that requirements bring, by the metadata of what is installed here."""
    found, open_ = set(), [canonicalize_name(wanted.name) for wanted in needs(texts)]
    while open_:
        name = open_.pop()
        if name not in found:
            found.add(name)
            open_ += [canonicalize_name(w.name) for w in needs(distribution(name).requires)]
    return found


LOSS = """
def loss(log_probs, old_log_probs, advantages, action_mask):
    ratio = (log_probs - old_log_probs).exp()
    return -(ratio * advantages * action_mask).sum() / action_mask.sum()
"""


@pytest.mark.processes
def test_the_base_alone_corrects_and_judges_losses_and_says_what_else_needs_more(wheel, tmp_path):
    """In an environment that holds the base's requirements and pytest."""
    made = tmp_path / "venv"
    run("-m", "venv", "--without-pip", made, cwd=tmp_path, **os.environ)
    (site,) = made.glob("lib/python*/site-packages")
    try:
        base = closure(PROJECT["dependencies"])
        link(base | closure(["pytest", "pytest-timeout", "hypothesis"]), site)
        zipfile.ZipFile(wheel).extractall(site)
        (tmp_path / "loss.py").write_text(LOSS)

        def base_run(*words, code=0):
            done = subprocess.run(
                [made / "bin/python", *words],
                cwd=tmp_path,
                env={"PATH": "/usr/bin:/bin", "PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=deadline(120),
            )
            assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
            return done.stdout + done.stderr

        shutil.copytree(ROOT / "tests/corrections", tmp_path / "tests")
        # tests/timing.py imports psutil, which the base has not
        (tmp_path / "tests/timing.py").write_text(
            "def deadline(seconds):\n    return 10 * seconds\n"
        )
        files = [f"tests/{name}.py" for name in ("test_functional_library", "test_formula_ratios")]
        assert " passed" in base_run("-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
        place, judged = base_run("-c", MAIN, "referee", "loss.py:loss", "json=true").split("\n", 1)
        assert place == str(site / "rlcore") and json.loads(judged)
        row = json.dumps({"logp_inf": [-1.0, -0.5], "logp_ref": [-1.0, -0.5]})
        (tmp_path / "rows.jsonl").write_text(f"{row}\n")
        assert "1 answers of rows.jsonl" in base_run("-c", MAIN, "diagnose", "rows.jsonl")
        assert "rlcore VERB --help" in base_run("-c", MAIN, "--help")
        refused = base_run("-c", MAIN, "train", "experiment=quickstart", code=2).splitlines()[-1]
        assert refused.endswith("without what trains: pip install 'rlcore[train]'.")
    finally:
        shutil.rmtree(made)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_the_documented_command_installs_the_program(wheel, tmp_path):
    """Into a new environment, to which the packages of the lock are linked instead of downloaded:
    nothing of the tests or of an extra is in it."""
    (command,) = [b for b in blocks("docs/index.md") if "-r requirements/cpu.lock" in b.text]
    made, work = tmp_path / "venv", tmp_path / "work"
    # not ensurepip's: it brings a setuptools of its own
    run("-m", "venv", "--without-pip", made, cwd=tmp_path, **os.environ)
    (site,) = made.glob("lib/python*/site-packages")
    for folder, file in (("requirements", ROOT / "requirements/cpu.lock"), ("dist", wheel)):
        (work / folder).mkdir(parents=True)
        shutil.copy(file, work / folder)
    try:
        link({"pip", *lock("cpu")}, site)
        env = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
        env |= {"PATH": f"{made}/bin:/usr/bin:/bin", "PIP_NO_INDEX": "1", "PYTHONNOUSERSITE": "1"}

        def shell(line, code=0):
            done = subprocess.run(
                ["bash", "-c", f'pip() {{ python -m pip "$@"; }}\n{line}'],
                cwd=work,
                env=env,
                capture_output=True,
                text=True,
                timeout=deadline(240),
            )
            assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
            return done.stdout + done.stderr

        shell(command.text)
        listed = json.loads(shell("pip list --format json"))
        names = {canonicalize_name(package["name"]) for package in listed}
        assert names - lock("cpu").keys() == {"pip", "rlcore"}
        words = "rlcore train experiment=quickstart run_dir=run dry_run=true"
        assert "the package wandb is not installed" in shell(words)
        assert "needs the package wandb" in shell(f"{words} logging.wandb=offline", 2)
        assert "needs the package gguf" in shell("rlcore fetch name=smollm2-135m out=m", 2)
        short = "schedule.steps=1 model.warmup.steps=2 evaluation.prompts=8 logging=quiet"
        shell(f"rlcore train experiment=quickstart run_dir=run {short} model.warmup.cache_dir=kept")
        assert len((work / "run/metrics.jsonl").read_text().splitlines()) == 1
    finally:
        shutil.rmtree(made)
