"""Data flows one way: the import contracts of pyproject.toml hold, and one file each knows vLLM and DeepSpeed."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "rlcore"


def _importers(package):
    """Files of rlcore that import `package` anywhere, also inside functions."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            if any(name.split(".")[0] == package for name in names):
                found.add(str(path.relative_to(PACKAGE)))
    return found


def test_the_import_contracts_hold():
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_one_file_knows_deepspeed_and_one_package_ray():
    assert _importers("deepspeed") == {"learner/deepspeed_engine.py"}
    assert {Path(f).parts[0] for f in _importers("ray")} == {"runtime"}


def test_vllm_is_known_to_one_file_and_the_attention_backends_beside_it():
    backends = {f for f in _importers("vllm") if Path(f).name.startswith("sparse_")}
    assert _importers("vllm") - backends == {"rollout/vllm_core.py"}
    assert all(Path(f).parts[0] == "rollout" for f in backends)
