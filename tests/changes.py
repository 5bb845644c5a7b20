"""Which test files belong to what changed since a commit.

A changed test belongs to itself. A changed module of rlcore belongs to the tests that import it or
a module that imports it, themselves or through helper modules of tests/. A changed helper or
conftest.py belongs to the tests that use it; tests/conftest.py, which all tests use, to none. Whole
runs import nothing of what they run: the slow tier's shares reach them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

import grimp
import structure
from structure import ROOT


class UnknownCommit(Exception):
    """The base is no commit of this checkout."""


def tests_since(base: str) -> list[str]:
    """Paths of test files, relative to the repository. Raises UnknownCommit."""
    return tests_of(changed_files(base))


def changed_files(base: str) -> list[str]:
    """Paths that differ between a commit and the working tree, untracked ones included."""
    if _git("cat-file", "-e", f"{base}^{{commit}}").returncode:
        raise UnknownCommit(f"{base} is not a commit of this checkout")
    found = [_git("diff", "--name-only", base), _git("ls-files", "--others", "--exclude-standard")]
    return sorted({line for done in found for line in done.stdout.splitlines()})


def tests_of(paths: Iterable[str]) -> list[str]:
    """Test files that belong to changed paths."""
    paths = [Path(p) for p in paths]
    modules = affected_modules(p for p in paths if p.parts[0] == "rlcore" and p.suffix == ".py")
    own = {p for p in paths if p.parts[0] == "tests" and p.suffix == ".py"}
    folders = {p.parent for p in own if p.name == "conftest.py"} - {Path("tests")}
    helpers = {p.stem for p in own if not p.name.startswith("test_")}
    imports = _test_imports()
    chosen = [
        path
        for path in imports
        if path.name.startswith("test_")
        and (
            path in own
            or folders & set(path.parents)
            or modules & (reached := _reached(path, imports))
            or reached & helpers
        )
    ]
    return sorted(map(str, chosen))


def affected_modules(paths: Iterable[Path]) -> set[str]:
    """Changed modules of rlcore, and those that import one."""
    graph = grimp.build_graph("rlcore", cache_dir=None)
    names = {".".join(p.with_suffix("").parts).removesuffix(".__init__") for p in paths}
    names &= graph.modules  # a deleted module has no importers any more
    return names.union(*map(graph.find_modules_that_directly_import, names))


def _test_imports() -> dict[Path, set[str]]:
    """Test file or helper -> what it imports: modules of rlcore, bare names of helpers."""
    return {
        source.path.relative_to(ROOT): structure.imported(source.tree)
        for source in structure.sources(ROOT / "tests")
    }


def _reached(path: Path, imports: dict[Path, set[str]]) -> set[str]:
    """What a test file imports, itself or through helpers."""
    helpers = {p.stem: p for p in imports if not p.name.startswith("test_")}
    found: set[str] = set()
    waiting = [path]
    while waiting:
        new = imports[waiting.pop()] - found
        found |= new
        waiting += [helpers[name] for name in new if name in helpers]
    return found


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
