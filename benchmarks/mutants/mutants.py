"""Mutation tests: one wrong line at a time in a copy of rlcore, and do the tests notice?

    make mutants                                    those of mutants.toml that start no process
    python -m benchmarks.mutants.mutants --needs processes  also those whose tests start processes
    python -m benchmarks.mutants.mutants --random 20 --seed 3 --packages buffer weights

Results are appended beside the table `--out`; a mutant is run again when its module or its test
files have changed, after those that never were. Exit code 1 if more than 5% survive unexplained.
mutmut and cosmic-ray do not fit: they run one set of tests for all mutants, and keep no chosen ones
that outlive a moved file.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import functools
import hashlib
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import machine, table

ROOT = Path(__file__).resolve().parents[2]
# what tests import beside rlcore, as pyproject.toml names it
PATHS = ("benchmarks/gpu", "tests/environments")
PACKAGES = ("attention", "buffer", "corrections", "learner", "objectives", "weights")
NEEDS = ("processes", "engine", "ranks", "cluster")
DEADLINE_S = 900.0  # of the tests of one mutant
SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
SWAPS |= {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*"}
DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Mutant:
    """A module with one wrong line, and what should notice."""

    name: str  # "function: text -> other text"
    path: Path  # of the module
    source: str  # all of it, with the wrong line
    tests: tuple[str, ...]  # files, or file::test, relative to the repository
    needs: str = ""  # a mark of NEEDS that these tests have
    survives: str = ""  # why nothing notices, where nothing can or need

    @property
    def digest(self) -> str:
        """Of the module and of the test files."""
        texts = [self.source, *((ROOT / test.split("::")[0]).read_text() for test in self.tests)]
        return hashlib.blake2b("".join(texts).encode(), digest_size=8).hexdigest()


def places(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """(qualified name, node) of every function and class, and ("", statement) of all else."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, DEFINITION):
            yield prefix + child.name, child
            yield from places(child, f"{prefix}{child.name}.")
        elif prefix:
            yield from places(child, prefix)
        elif isinstance(child, ast.stmt):
            yield "", child


class Text:
    """A module's source and tree, and the places of nodes in it."""

    def __init__(self, path: Path) -> None:
        self.source = path.read_text()
        self.tree = ast.parse(self.source)
        lengths = [len(line) for line in self.source.splitlines(keepends=True)]
        self._starts = [sum(lengths[:i]) for i in range(len(lengths))]

    def _span(self, node: Any) -> tuple[int, int]:
        end = self._starts[node.end_lineno - 1] + node.end_col_offset
        return self._starts[node.lineno - 1] + node.col_offset, end

    def found(self, place: str, text: str) -> set[int]:
        """Where a text stands in what has this name."""
        at = [m.start() for m in re.finditer(re.escape(text), self.source)]
        if not at:  # most modules, and their trees are large
            return set()
        spans = [self._span(node) for name, node in self._places if name == place]
        return {a for a in at if any(begin <= a < end for begin, end in spans)}

    @functools.cached_property
    def _places(self) -> list[tuple[str, ast.AST]]:
        return list(places(self.tree))

    def changes(self) -> Iterator[tuple[str, int, int, str]]:
        """(place, begin, end, other text) of what `_of` knows, of functions and methods."""
        for place, node in places(self.tree):
            inner = [n for name, n in places(node, "x.")] if place else []
            skipped = {id(n) for i in inner for n in ast.walk(i)}
            for n in ast.walk(node):
                # messages; in Python 3.11 what is within an f-string has no place of its own
                if isinstance(n, ast.Raise | ast.Assert | ast.JoinedStr):
                    skipped |= {id(below) for below in ast.walk(n)}
                if place and id(n) not in skipped:
                    yield from ((place, *change) for change in self._of(n))

    def _of(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        """A comparison's boundary, a sign, a constant plus 1, no call, a condition negated."""
        match node:
            case ast.Compare(left=a, comparators=[b]) | ast.BinOp(left=a, right=b):
                begin, end = self._span(a)[1], self._span(b)[0]
                sign = self.source[begin:end].strip(" ()\n")
                if sign in SWAPS:
                    at = self.source.index(sign, begin)
                    yield at, at + len(sign), SWAPS[sign]
            case ast.Constant(value=value) if type(value) in (int, float):
                yield *self._span(node), repr(value + 1)
            case ast.Expr(value=ast.Call() | ast.Await()):
                yield *self._span(node), "pass"
            case ast.If(test=test) | ast.IfExp(test=test):
                yield *self._span(test), f"not ({ast.get_source_segment(self.source, test)})"


class Package:
    """The modules of rlcore and the test files."""

    def __init__(self) -> None:
        self.texts = {path: Text(path) for path in sorted((ROOT / "rlcore").rglob("*.py"))}
        self.tests = sorted((ROOT / "tests").rglob("test_*.py"))

    def chosen(self, entry: dict[str, Any]) -> Mutant:
        """A mutant of mutants.toml, by text and names, so that a module may be moved.

        Raises ValueError unless it and its test files are found once."""
        place, old, new = entry["in"], entry["line"], entry["becomes"]
        found = [(p, t, at) for p, t in self.texts.items() for at in t.found(place, old)]
        if len(found) != 1:
            raise ValueError(f"{old!r} stands {len(found)} times in {place or 'top levels'}")
        path, text, at = found[0]
        source = text.source[:at] + new + text.source[at + len(old) :]
        tests = tuple(map(self._test, entry["tests"]))
        more = entry.get("needs", ""), entry.get("survives", "")
        return Mutant(f"{place}: {old} -> {new}", path, source, tests, *more)

    def _test(self, name: str) -> str:
        file, *test = name.split("::")
        found = [str(path.relative_to(ROOT)) for path in self.tests if path.name == file]
        if len(found) != 1:
            raise ValueError(f"there are {len(found)} test files of the name {file}")
        return "::".join([*found, *test])

    def random(self, packages: Sequence[str], count: int, seed: int) -> Iterator[Mutant]:
        """Random mutants of some packages, each with the tests of its package that are nearest."""
        texts = {p: t for p, t in self.texts.items() if p.relative_to(ROOT).parts[1] in packages}
        sites = [(p, c) for p, t in texts.items() if t.source.isascii() for c in t.changes()]
        for path, (place, begin, end, new) in random.Random(seed).sample(sites, count):
            before = texts[path].source
            source = before[:begin] + new + before[end:]
            line = before.count("\n", 0, begin)
            old, wrong = (s.splitlines()[line].strip() for s in (before, source))
            yield Mutant(f"{place}: {old} -> {wrong}", path, source, self._nearest(path))

    def _nearest(self, module: Path) -> tuple[str, ...]:
        """Test files of its package that import it, or else what imports it, and so on."""
        package = module.relative_to(ROOT).parts[1]
        tests = [p for p in self.tests if p.relative_to(ROOT).parts[1] == package]
        reached = {module}
        while True:
            files = [path.relative_to(ROOT).with_suffix("") for path in reached]
            names = {".".join(file.parts).removesuffix(".__init__") for file in files}
            near = [path for path in tests if imports(path) & names]
            more = {path for path in self.texts if imports(path) & names} - reached
            if near or not more:
                return tuple(str(path.relative_to(ROOT)) for path in near or tests)
            reached |= more


@functools.cache
def imports(path: Path) -> set[str]:
    """Modules that a file imports, itself or by a helper beside it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            helper = path.parent / f"{node.module}.py"
            found |= imports(helper) if helper.is_file() else set()
    return found


class Runner:
    """Runs tests on a copy of rlcore, in forks of this process, which has not imported it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.copytree(ROOT / "rlcore", folder / "rlcore")
        compileall.compile_dir(str(folder / "rlcore"), quiet=1)
        for name in ("configs", "benchmarks"):
            (folder / name).symlink_to(ROOT / name)
        for name in ("hypothesis", "torch", "transformers"):
            __import__(name)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        runpy.run_path(str(ROOT / "tests/timing.py"))["slowness"]()  # once, the forks inherit it
        self._sound: set[str] = set()  # tests that pass without a mutant

    def outcome(self, mutant: Mutant) -> str:
        """killed or survived. Raises ValueError if its tests fail without it, too."""
        for test in mutant.tests:
            if test not in self._sound and not self._pass(mutant, test):
                raise ValueError(f"{test} fails, or runs nothing, without any mutant")
            self._sound.add(test)
        copied = self._folder / mutant.path.relative_to(ROOT)
        copied.write_text(mutant.source)
        try:
            return "survived" if self._pass(mutant, *mutant.tests) else "killed"
        finally:
            shutil.copy2(mutant.path, copied)  # with its time, by which its compiled form is known

    def _pass(self, mutant: Mutant, *tests: str) -> bool:
        child = get_context("fork").Process(target=self._test, args=(tests, mutant.needs))
        child.start()
        child.join(DEADLINE_S)  # an endless loop is noticed, too
        with contextlib.suppress(ProcessLookupError):  # what the tests left
            os.killpg(child.pid, signal.SIGKILL)
        child.join()
        return child.exitcode == 0

    def _test(self, tests: Sequence[str], needs: str) -> None:
        os.setsid()
        os.chdir(ROOT)
        sys.dont_write_bytecode = True
        sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]
        sys.path.insert(0, str(self._folder))
        os.environ["PYTHONPATH"] = str(self._folder)
        import rlcore

        if not str(rlcore.__file__).startswith(str(self._folder)):
            os._exit(3)  # nothing of the copy would be tested
        with (self._folder / "log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        marks = " and ".join(["not slow", *(f"not {m}" for m in NEEDS if m != needs)])
        # not the repository itself, whose rlcore is whole
        words = ["-o", f"pythonpath={' '.join(str(ROOT / path) for path in PATHS)}"]
        words += ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
        os._exit(int(pytest.main([*words, "-m", marks, *tests])))


def due(mutants: Sequence[Mutant], rows: dict[str, dict[str, str]]) -> list[Mutant]:
    """Those without a result of this code and these tests, first those without any."""
    stale = [m for m in mutants if rows.get(m.name, {}).get("digest") != m.digest]
    return sorted(stale, key=lambda m: m.name in rows)


def run(
    mutants: Sequence[Mutant], origin: str, results: Path, *, minutes: float = math.inf
) -> list[dict[str, str]]:
    """Run those that are due, and append their results; all results. Begins none after so many
    minutes."""
    results.touch()
    rows = {r["mutant"]: r for r in map(json.loads, results.read_text().splitlines())}
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        runner = Runner(Path(folder))
        for m in takewhile(lambda _: time.monotonic() < end, due(mutants, rows)):
            row = {"mutant": m.name, "package": m.path.relative_to(ROOT).parts[1], "from": origin}
            try:
                rows[m.name] = row | {"outcome": runner.outcome(m), "digest": m.digest}
            except ValueError as e:  # it has no verdict, others may have one
                print(m.name, e, flush=True)
                continue
            print(*rows[m.name].values(), flush=True)
            with results.open("a") as file:
                file.write(json.dumps(rows[m.name]) + "\n")
    return list(rows.values())


def write(page: Path, rows: Sequence[dict[str, str]], unexplained: int, missing: int) -> None:
    """The table of all results. missing: those of the list without any."""
    every = Counter(row["package"] for row in rows)
    killed = Counter(row["package"] for row in rows if row["outcome"] == "killed")
    packages = [{"package": p, "mutants": every[p], "killed": killed[p]} for p in sorted(every)]
    for row in rows:
        row["mutant"] = f"`` {' '.join(row['mutant'].split())} ``".replace("|", "\\|")
    page.write_text(
        "# Mutants\n\nWritten by `make mutants`; `benchmarks/mutants/mutants.py` says how. "
        f"{machine()}.\n\nOf {len(rows)} wrong lines, one at a time, the tests notice "
        f"{killed.total()}; {unexplained} survive without an explanation. Of the list, {missing} "
        f"have not run.\n\n{table(packages)}"
        f"\n\n{table(rows, ('mutant', 'from', 'outcome'))}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutation tests: do the tests notice wrong lines?")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/mutants_cpu.md")
    parser.add_argument("--needs", choices=NEEDS, nargs="*", default=[])
    parser.add_argument("--random", type=int, help="so many random ones instead of mutants.toml's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin none after so many")
    parser.add_argument("--packages", nargs="*", default=PACKAGES)
    args = parser.parse_args()
    package = Package()
    entries = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["mutant"]
    chosen = [package.chosen(entry) for entry in entries]
    wanted = [m for m in chosen if m.needs in ("", *args.needs)]
    if args.random:
        wanted = list(package.random(args.packages, args.random, args.seed))
    origin = f"seed {args.seed}" if args.random else "list"
    results = run(wanted, origin, args.out.with_suffix(".jsonl"), minutes=args.minutes)
    why = {mutant.name: mutant.survives for mutant in chosen}
    rows = [row for row in results if row["mutant"] in why or row["from"] != "list"]
    survivors = [row for row in rows if row["outcome"] == "survived"]
    for row in survivors:
        row["outcome"] += f": {why.get(row['mutant']) or 'NOT EXPLAINED'}"
        print(row["mutant"], row["outcome"])
    unexplained = sum(row["outcome"].endswith("NOT EXPLAINED") for row in survivors)
    write(args.out, rows, unexplained, len(why.keys() - {row["mutant"] for row in rows}))
    return int(unexplained > 0.05 * len(rows))


if __name__ == "__main__":
    sys.exit(main())
