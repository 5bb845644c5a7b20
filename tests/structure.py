"""Measures the shape of the code: sizes, parameters, comments, import cycles.

    python tests/structure.py [DIR ...]      one column of figures for each package folder
    python tests/structure.py --write        drop what is no longer true from tests/structure.json
    python tests/structure.py --write --add  add to it what is new, too: say why in the commit
    python tests/structure.py --warnings     matters of taste, which fail nothing (`make lint`)

`tests/structure.json` lists what is larger, smaller or named otherwise than it should be. The lists
only shrink: `tests/test_style.py` fails for what is not on a list, and for an entry that is no
longer true. The standard library alone, so that any checkout can be measured.
"""

from __future__ import annotations

import ast
import io
import json
import math
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import prose

COLUMNS = 100
ROOT = Path(__file__).resolve().parents[1]
LISTS = ROOT / "tests" / "structure.json"
FILE_LINES, FUNCTION_LINES = 600, 80  # above: on a list
SMALL_FILE = 60  # lines; below, and with a single importer: on a list
FOLDERS = ("rlcore", "tests", "benchmarks")
# Turns of phrase that have to be decoded, from the review of the first version. Lower case.
LITERARY = (
    "build not be found",
    "make their problems up",
    "made up",
    "made-up",
    "made_up",
    "what is wrong is said",
    "what somebody holds",
    "for ever",
    "wants company",
    "want company",
    "deadline of nobody",
    "without a word",
    "buffer to write its journal",
    "handed out",
    "hands out",
    "is told",
    "sicken",
    "as it stands",
    "does not go with",
    "goes beside",
    "goes with",
    "of no account",
)
# of each page of docs/corrections, in this order; others may stand between them
SECTIONS = ("When to use it", "Formula", "Keys", "What to watch", "When it does not help", "Source")
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
    """A function or method. Example: Routine("learner/lm_head.py", "head_pass", 12, 41, 5)"""

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


def unclear_docstrings(source: Source) -> Iterator[str]:
    """Docstrings that begin with What, Whether or Which: no sentence, and no noun."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(source.tree):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if text and re.match(r"(what|whether|which)\b", text, re.IGNORECASE):
            yield f"{source.name}: {text.splitlines()[0]}"


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

    Files of one folder tree have different names, and import each other by their bare or dotted
    names. Imports inside functions and under TYPE_CHECKING count too.
    """
    found = sources(folder)
    dotted = {
        ".".join(source.path.relative_to(folder.parent).with_suffix("").parts): source.path.stem
        for source in found
    }
    names = dotted | {stem: stem for stem in dotted.values()}
    edges = {
        source.path.stem: {names[name] for name in imported(source.tree) if name in names}
        for source in found
    }
    for start in edges:
        trail = _path_back(start, edges)
        if trail:
            return trail
    return []


def imported(tree: ast.Module) -> set[str]:
    """Dotted names that a file imports anywhere, also inside functions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from rlcore.config import compose` imports a module, too
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
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


def import_circles(folder: Path) -> list[str]:
    """The circles among the files of a package, each as the modules that reach each other.

    Imports inside functions and under TYPE_CHECKING count too, which import-linter leaves out.
    """
    known = {_module(source, folder): source.tree for source in sources(folder)}
    edges = {name: _edges(tree, set(known)) - {name} for name, tree in known.items()}
    reach = {name: _reachable(name, edges) for name in edges}
    circles = {tuple(sorted(m for m in reach[n] if n in reach[m])) for n in edges}
    return [", ".join(circle) for circle in sorted(circles) if circle]


def _edges(tree: ast.Module, known: set[str]) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                module = f"{node.module}.{alias.name}"  # or an object of the module
                found.add(module if module in known else str(node.module))
    return found & known


def _reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    new = set(edges[start])
    while new:
        found |= new
        new = set().union(*(edges[name] for name in new)) - found
    return found


def exceptions(folder: Path = ROOT / "rlcore") -> dict[str, list[str]]:
    """What is on each list of tests/structure.json, by the code as it is."""
    found = sources(folder)
    return {
        f"files over {FILE_LINES} lines": [s.name for s in found if len(s.lines) > FILE_LINES],
        f"files under {SMALL_FILE} lines with a single importer": _single_importers(folder),
        "circles of imports": import_circles(folder),
        "class names used twice": _repeated_classes(found),
        "file names used twice": _repeated_files(found),
        f"functions over {FUNCTION_LINES} lines": sorted(
            r.where for source in found for r in routines(source) if r.length > FUNCTION_LINES
        ),
    }


def _single_importers(folder: Path, below: float = SMALL_FILE) -> list[str]:
    """Files of fewer lines than `below` that one other file of the package imports."""
    found = sources(folder)
    names = {source.name: _module(source, folder) for source in found}
    importers: dict[str, set[str]] = {}
    for source in found:
        for name in imported(source.tree):
            importers.setdefault(name, set()).add(source.name)
    return [
        source.name
        for source in found
        if len(source.lines) < below and source.path.name != "__init__.py"
        if len(importers.get(names[source.name], set()) - {source.name}) == 1
    ]


def _module(source: Source, folder: Path) -> str:
    parts = (folder.name, *Path(source.name).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def _repeated_classes(found: list[Source]) -> list[str]:
    """Names that classes of several files have."""
    names = [
        node.name for source in found for node in source.tree.body if isinstance(node, ast.ClassDef)
    ]
    return sorted({name for name in names if names.count(name) > 1})


def _repeated_files(found: list[Source]) -> list[str]:
    """Names that files of several folders have, but for what each package may have."""
    names = [source.path.name for source in found]
    usual = {"__init__.py", "specs.py", "protocols.py"}
    return sorted({name for name in names if names.count(name) > 1} - usual)


def differences() -> tuple[list[str], list[str]]:
    """(what is on no list and should be, what is on a list and is no longer true)."""
    listed, now = json.loads(LISTS.read_text()), exceptions()
    new = [f"{name}: {e}" for name, all_ in now.items() for e in all_ if e not in listed[name]]
    gone = [f"{name}: {e}" for name, all_ in listed.items() for e in all_ if e not in now[name]]
    return new, gone


def write(add: bool) -> None:
    """Bring tests/structure.json up to date; what is new only where `add`."""
    listed = json.loads(LISTS.read_text()) if LISTS.exists() else {}
    now = exceptions()
    kept = {n: [e for e in now[n] if add or e in listed.get(n, ())] for n in now}
    LISTS.write_text(json.dumps(kept, indent=2) + "\n")
    for name in now:
        print(f"{len(kept[name])} {name} (before: {len(listed.get(name, ()))})")
    for entry in differences()[0]:
        print(f"not added: {entry}")


def warnings() -> Iterator[str]:
    """Matters of taste: words that have to be decoded, pages that differ from their neighbours."""
    texts = {p: p.read_text() for p in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
    for folder in FOLDERS:
        texts |= {source.path: source.text for source in sources(ROOT / folder)}
    del texts[Path(__file__).resolve()]
    phrase = re.compile(rf"\b(?:{'|'.join(LITERARY)})\b")
    for path, text in texts.items():
        flowing = re.sub(r"\s+(?:# +)?", " ", text.lower())  # a phrase may span two lines
        for words in phrase.findall(flowing):
            yield f"{path.relative_to(ROOT)} says {words!r}"
    sys.path.append(str(ROOT / "docs"))
    import screenshots

    for name in screenshots.stale():
        yield f"docs/images/{name}.png is older than its sources: make screenshots RUN_DIR=DIR"
    for path in prose.finished():
        yield from (f"{path.relative_to(ROOT)}: {found}" for found in prose.of_file(path))
    for path in sorted((ROOT / "docs" / "corrections").glob("*.md")):
        given = re.findall(r"^## (.*)", path.read_text(), re.MULTILINE)
        if path.stem != "index" and [name for name in given if name in SECTIONS] != [*SECTIONS]:
            yield f"{path.relative_to(ROOT)} has not the sections of its neighbours: {given}"


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
        "functions": str(len(everything)),
        "median function": f"{statistics.median(r.length for r in everything):g}",
        "files that one other file imports": str(len(_single_importers(folder, math.inf))),
        "circles of imports": str(len(import_circles(folder))),
        "most parameters of a function": f"{most.parameters} ({most.where})",
        "functions of more than 8 parameters": str(sum(r.parameters > 8 for r in everything)),
        "longest function": f"{tallest.length} ({tallest.where})",
        f"functions over {FUNCTION_LINES} lines": str(
            sum(r.length > FUNCTION_LINES for r in everything)
        ),
        "functions over 40 lines": str(sum(r.length > 40 for r in everything)),
        "comment lines": f"{comments} ({100 * comments / total:.1f}%)",
        f"lines over {COLUMNS} columns": f"{over} ({100 * over / total:.1f}%)",
        "tuple assignments of three and more to self": str(
            sum(len(tuple_assignments(s)) for s in found)
        ),
        "classes of more than 12 methods": f"{len(big)}" + (f" ({', '.join(big)})" if big else ""),
        "longest file": f"{lengths[longest]} ({longest})",
        f"files over {FILE_LINES} lines": str(sum(n > FILE_LINES for n in lengths.values())),
        "median file": f"{statistics.median(lengths.values()):g}",
    }


def main() -> None:
    words = sys.argv[1:]
    if "--warnings" in words:
        for warning in warnings():
            print(f"warning: {warning}")
        return
    if "--write" in words:
        write(add="--add" in words)
        return
    folders = [Path(word) for word in words] or [ROOT / "rlcore"]
    columns = [figures(folder) for folder in folders]
    print("| | " + " | ".join(map(str, folders)) + " |")
    print("| --- " * (len(folders) + 1) + "|")
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(column[name] for column in columns) + " |")


if __name__ == "__main__":
    main()
