"""Measures the shape of the code: sizes, parameters, comments, import cycles.

    python tests/structure.py [DIR ...]      one column of figures for each package folder

`tests/test_style.py` holds the limits; this script prints how far the code is from them. The
standard library alone, so that any checkout can be measured.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

COLUMNS = 100
ROOT = Path(__file__).resolve().parents[1]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file, read and parsed once."""

    path: Path
    name: str  # relative to the folder that was asked for
    text: str
    tree: ast.Module

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


@dataclass(frozen=True, slots=True)
class Routine:
    """A function or method. Example: Routine("learner/head.py", "head_pass", 12, 41, 5)"""

    file: str
    name: str  # qualified: "Class.method", "outer.inner"
    line: int
    length: int  # lines, signature and docstring included, decorators not
    parameters: int  # all kinds, without self and cls

    @property
    def where(self) -> str:
        return f"{self.file}: {self.name}"


@cache
def sources(folder: Path) -> list[Source]:
    """Every Python file below a folder, in order of name."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        found.append(Source(path, str(path.relative_to(folder)), text, ast.parse(text, str(path))))
    return found


def routines(source: Source) -> Iterator[Routine]:
    """Every function of a file, methods and nested ones included."""
    for name, node in _named(source.tree, ""):
        if isinstance(node, Function):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            yield Routine(source.name, name, node.lineno, length, _parameters(node))


def classes(source: Source) -> Iterator[tuple[str, int]]:
    """(name, number of methods) of every class, properties and __init__ included."""
    for name, node in _named(source.tree, ""):
        if isinstance(node, ast.ClassDef):
            yield name, sum(isinstance(child, Function) for child in node.body)


def definitions(tree: ast.AST) -> set[str]:
    """Names of all functions and classes, "Class.method" and "method", and module constants."""
    found = set()
    for name, _node in _named(tree, ""):
        found |= {name, name.rpartition(".")[2]}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def _named(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*Function.__args__, ast.ClassDef)):
            name = f"{prefix}{child.name}"
            yield name, child
            yield from _named(child, f"{name}.")
        else:
            yield from _named(child, prefix)


def _parameters(node: Function) -> int:
    given = node.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    count = len([a for a in named if a.arg not in ("self", "cls")])
    return count + (given.vararg is not None) + (given.kwarg is not None)


def long_lines(source: Source) -> list[int]:
    """Numbers of the lines over the column limit."""
    return [n for n, line in enumerate(source.lines, 1) if len(line) > COLUMNS]


def comment_lines(source: Source) -> int:
    """Lines that hold a comment, alone or after code. Docstrings do not count."""
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    return len({t.start[0] for t in tokens if t.type == tokenize.COMMENT})


def tuple_assignments(source: Source) -> list[int]:
    """Lines that assign three or more attributes of self at once."""
    found = []
    for node in ast.walk(source.tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            if isinstance(target, ast.Tuple) and sum(map(_of_self, target.elts)) >= 3:
                found.append(node.lineno)
    return found


def _of_self(node: ast.expr) -> bool:
    owner = node.value if isinstance(node, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id == "self"


def import_cycle(folder: Path) -> list[str]:
    """One cycle among the files of a folder of scripts, or [] where there is none.

    A script names its neighbours by their bare module names. Imports inside functions and under
    TYPE_CHECKING count too.
    """
    found = sources(folder)
    known = {source.path.stem for source in found}
    edges = {source.path.stem: _imported(source.tree) & known for source in found}
    for start in edges:
        trail = _path_back(start, edges)
        if trail:
            return trail
    return []


def _imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def _path_back(start: str, edges: dict[str, set[str]]) -> list[str]:
    """A path from `start` to itself."""
    trails, seen = [[start]], set()
    while trails:
        trail = trails.pop()
        for name in sorted(edges[trail[-1]]):
            if name == start:
                return [*trail, start]
            if name not in seen:
                seen.add(name)
                trails.append([*trail, name])
    return []


def figures(folder: Path) -> dict[str, str]:
    """The table of a package: what is measured, and the figure with its place."""
    found = sources(folder)
    everything = [r for source in found for r in routines(source)]
    lengths = {source.name: len(source.lines) for source in found}
    total = sum(lengths.values())
    most = max(everything, key=lambda r: r.parameters)
    tallest = max(everything, key=lambda r: r.length)
    longest = max(lengths, key=lambda name: lengths[name])
    over = sum(len(long_lines(source)) for source in found)
    comments = sum(map(comment_lines, found))
    big = [name for source in found for name, methods in classes(source) if methods > 12]
    return {
        "files": str(len(found)),
        "lines": str(total),
        "most parameters of a function": f"{most.parameters} ({most.where})",
        "functions of more than 8 parameters": str(sum(r.parameters > 8 for r in everything)),
        "longest function": f"{tallest.length} ({tallest.where})",
        "functions over 60 lines": str(sum(r.length > 60 for r in everything)),
        "functions over 40 lines": str(sum(r.length > 40 for r in everything)),
        "comment lines": f"{comments} ({100 * comments / total:.1f}%)",
        f"lines over {COLUMNS} columns": f"{over} ({100 * over / total:.1f}%)",
        "tuple assignments of three and more to self": str(
            sum(len(tuple_assignments(s)) for s in found)
        ),
        "classes of more than 12 methods": f"{len(big)}" + (f" ({', '.join(big)})" if big else ""),
        "longest file": f"{lengths[longest]} ({longest})",
        "files over 350 lines": str(sum(length > 350 for length in lengths.values())),
        "median file": f"{statistics.median(lengths.values()):g}",
    }


def main() -> None:
    folders = [Path(word) for word in sys.argv[1:]] or [ROOT / "rlcore"]
    columns = [figures(folder) for folder in folders]
    print("| | " + " | ".join(map(str, folders)) + " |")
    print("| --- " * (len(folders) + 1) + "|")
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(column[name] for column in columns) + " |")


if __name__ == "__main__":
    main()
