"""`requirements/cuda.lock` is installed for real, and all of it is imported that can be without a
driver."""

import os
import shutil
import subprocess
from pathlib import Path

import pack
import pytest
from structure import ROOT

FREE_GIB = 20  # the profile takes 9 GiB; pip unpacks beside it

IMPORT_ALL = """
import importlib, json, pkgutil
import rlcore, torch
assert torch.version.cuda, torch.__version__
for module in pkgutil.walk_packages(rlcore.__path__, "rlcore."):
    importlib.import_module(module.name)
for name in ("vllm", "ray", "deepspeed", "transformers", "peft", "flashinfer", "triton"):
    importlib.import_module(name)
print("imported all")
"""

# vLLM's kernels are linked against the driver's library. An empty one, from a package of the lock,
# stands in for it: what is then missing would be a symbol of another torch than the locked one.
LOAD_KERNELS = """
import importlib, pathlib, sys
import torch, vllm
root = pathlib.Path(vllm.__file__).parent
names = sorted(
    ".".join(p.relative_to(root.parent).with_suffix("").with_suffix("").parts)
    for p in root.rglob("*.abi3.so")
)
for name in names:
    importlib.import_module(name)
print("loaded", len(names))
"""


OLDER_TORCH = "torch==2.11.0"  # of the GPU kit's machine
# by their files, since vLLM's Python is of another torch
LOAD_FILES = """
import importlib.util, pathlib, sys
import torch
for path in map(pathlib.Path, sys.argv[1:]):
    spec = importlib.util.spec_from_file_location(path.name.split(".")[0], path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
print("loaded", len(sys.argv) - 1, "with", torch.__version__)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A checkout with the CUDA profile installed in its .venv."""
    folder = tmp_path_factory.mktemp("cuda")
    if shutil.disk_usage(folder).free < FREE_GIB << 30:
        pytest.skip(f"less than {FREE_GIB} GiB free where the CUDA profile would be installed")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("requirements", "rlcore"):
        shutil.copytree(ROOT / name, folder / name)
    # without a local store of wheels, which may hold a CPU build of the same version of torch
    env = os.environ | {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    done = subprocess.run(
        ["bash", "requirements/install.sh", "cuda"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr
    yield folder
    shutil.rmtree(folder)


def python(folder: Path, script: str, *words: str, **env: str) -> str:
    done = subprocess.run(
        [folder / ".venv/bin/python", "-c", script, *words],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(2400)
def test_the_cuda_profile_installs_and_imports_without_a_driver(installed, tmp_path):
    assert "imported all" in python(installed, IMPORT_ALL)
    site = installed / ".venv/lib/python3.11/site-packages"
    [stand_in] = site.glob("pynvvideocodec*/libcuda-*.so")
    shutil.copy(stand_in, tmp_path / "libcuda.so.1")
    said = python(installed, LOAD_KERNELS, LD_LIBRARY_PATH=str(tmp_path))
    assert int(said.split()[-1]) >= 10


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(2400)
def test_vllm_s_extensions_load_with_an_older_torch_but_for_two(installed, tmp_path):
    command = [installed / ".venv/bin/python", "-m", "pip", "install", "-q", "--no-compile"]
    older = tmp_path / "older"
    done = subprocess.run(
        [*command, "--target", older, OLDER_TORCH],
        env=os.environ | {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr
    site = installed / ".venv/lib/python3.11/site-packages"
    removed = pack.unloadable(site, older / "torch/lib")
    names = {str(library.relative_to(site / "vllm")) for library in removed}
    assert names == {"_qutlass_C.abi3.so", "third_party/deep_gemm/_C_extension.abi3.so"}
    rest = [str(p) for p in sorted((site / "vllm").rglob("*.abi3.so")) if p not in removed]
    [stand_in] = site.glob("pynvvideocodec*/libcuda-*.so")
    shutil.copy(stand_in, tmp_path / "libcuda.so.1")
    said = python(
        installed, LOAD_FILES, *rest, LD_LIBRARY_PATH=str(tmp_path), PYTHONPATH=str(older)
    )
    assert f"loaded {len(rest)} with 2.11.0" in said and len(rest) >= 10


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(2400)
def test_a_cpu_build_of_torch_is_refused_for_the_cuda_profile(installed):
    stamp = installed / ".venv/.rlcore-stamp"
    kept = stamp.read_text()
    version = installed / ".venv/lib/python3.11/site-packages/torch/version.py"
    text = version.read_text()
    try:
        version.write_text(text + "\ncuda = None\n")
        stamp.unlink()
        done = subprocess.run(
            ["bash", "requirements/install.sh", "cuda"],
            cwd=installed,
            env=os.environ | {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 2
        assert "no CUDA build" in done.stderr
        assert not stamp.exists()
    finally:
        version.write_text(text)
        stamp.write_text(kept)
