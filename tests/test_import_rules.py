"""Data flows one way: the import contracts of pyproject.toml hold, and vLLM, DeepSpeed and Ray are
each imported in one place."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "rlcore"


@cache
def _imports():
    """File of rlcore -> top-level packages that it imports anywhere, also inside functions."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split(".")[0])
        found[path.relative_to(PACKAGE)] = names
    return found


@pytest.mark.processes
def test_the_import_contracts_hold():
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("package", "folder"),
    [
        ("ray", "cluster"),
        ("vllm", "rollout/engines/vllm"),
        ("deepspeed", "learner/engines"),
        ("hydra", "config"),
        ("wandb", "metrics"),
    ],
)
def test_a_package_is_imported_in_one_folder(package, folder):
    importers = {path for path, names in _imports().items() if package in names}
    assert importers
    elsewhere = {str(path) for path in importers if Path(folder) not in path.parents}
    # the learner's end of vLLM's weight transfer, and a kernel of vLLM's wheel
    ends = {"weights/vllm_transfer.py", "attention/varlen.py"}
    assert elsewhere == (ends if package == "vllm" else set())


def test_specifications_and_registries_import_nothing_heavy():
    heavy = {"torch", "ray", "vllm", "transformers", "deepspeed"}
    names = ("specs.py", "registry.py")
    found = {path: names_ & heavy for path, names_ in _imports().items() if path.name in names}
    assert len(found) > 8
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.processes
def test_a_run_is_prepared_without_torch(tmp_path):
    """Its driver would import it before any other process starts."""
    code = (
        "import sys\n"
        "import rlcore.commands.start_checks as command\n"
        "from rlcore.config.compose import load\n"
        f"ready = command.check(load(['experiment=quickstart', 'run_dir={tmp_path}/run']))\n"
        "from pathlib import Path\n"
        "from rlcore.commands import about\n"
        "about.DRIVERS = ()\n"
        "off = ['experiment=quickstart', 'run_dir=x', 'cluster.cpu_fast_paths=false']\n"
        "assert about.run_kernels(load(off)) is None\n"
        "assert not [name for name in sys.modules if name.startswith('rlcore.cluster.cpu')]\n"
        "kernels = about.run_kernels(ready.config)\n"
        "limit = about.limit_facts(ready.config, ready.tokenizer, kernels)\n"
        f"about.write_about(Path({str(tmp_path)!r}), kernels, limit)\n"
        "found = {'torch', 'vllm', 'deepspeed'} & set(sys.modules)\n"
        "sys.exit(str(found) if found else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
