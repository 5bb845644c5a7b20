"""Benchmarks are run by hand, some on GPUs alone: what they import from rlcore must be there."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "docs").glob("*.py")]


def taken(path):
    """(module of rlcore, name) of every import of a file, those within functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rlcore":
            yield from ((node.module, alias.name) for alias in node.names)


def found(module, name):
    if hasattr(importlib.import_module(module), name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize("path", sorted(FILES), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_is_there(path):
    assert not [pair for pair in taken(path) if not found(*pair)]
