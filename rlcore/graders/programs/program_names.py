"""Names that the tests of a program use: the program's own, the reference's, and Python's."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import re
import symtable
import sys
from collections.abc import Collection, Iterator

from rlcore.graders.fences import defined_names
from rlcore.graders.programs.program_helpers import helpers
from rlcore.graders.sandbox import ProgramTests


class BadTests(ValueError):
    """Tests that cannot judge a program; the message says why."""


# Modules that tests name the program by, in `from solution import f`.
PROGRAM_MODULES = frozenset(
    {"solution", "solutions", "your_solution", "program", "submission", "answer", "candidate"}
    | {"main", "your_module", "my_module", "your_code"}
)
ALIASES = {"np": "numpy", "numpy": "numpy"}
NOT_LIBRARY = frozenset({"antigravity", "this", "__main__", "tkinter", "turtle", "idlelib"})
CLASS_NAME = re.compile(r"[A-Z]+[a-z0-9]+(?:[A-Z]+[a-z0-9]*)*")


def program_tests(source: str, reference: str, given: Collection[str]) -> ProgramTests:
    """Tests with the names that the program must define.

    These are what the reference solution defines, and what nothing else does. Others are Python,
    the preamble (its names are `given`), the tests, an import of the reference, and a module of the
    library that the tests name. Everything else in the tests, `set`, `sorted` and `np` among it,
    has Python's own meaning, whatever the program does to it. What the reference defines to check
    results (`program_helpers`) is the reference's, too.

    Without a reference a function under test may have the name of one that is given (`gcd`): if
    there is no other candidate, it is what the tests call first. Raises BadTests for tests that
    are not Python or that use nothing of a program.
    """
    try:
        source, asked = _without_program_imports(source)
        used = _free_names(source) | asked
    except (SyntaxError, ValueError) as error:
        raise BadTests(f"not Python: {error}") from error
    own = defined_names(reference) & used
    imports = {n: text for n, text in _imports(reference).items() if n in used - own - asked}
    imports |= {
        name: _library(source, name)
        for name in used - own - set(given) - set(imports) - asked
        if _library(source, name)
    }
    known = set(given) | set(dir(builtins)) | set(imports)
    found = own | asked | (used - known)
    if not found:
        called = [name for name in _called(source) if name in used]
        found = set([*(n for n in called if n in given or n in imports), *called][:1])
    if not found:
        raise BadTests("they use no name that a program could define")
    checkers = helpers(source, reference, own) if own == found else frozenset()
    found -= checkers
    classes = _classes(reference) if own else {n for n in found if CLASS_NAME.fullmatch(n)}
    return ProgramTests(
        source,
        tuple(sorted(found)),
        tuple(sorted(found & classes)),
        "\n".join(sorted({text for name, text in imports.items() if name not in found})),
        helpers=tuple(sorted(checkers)),
        reference=reference if checkers else "",
    )


def _without_program_imports(source: str) -> tuple[str, set[str]]:
    """Tests without imports of the program, and the names that these gave them."""
    tree = ast.parse(source)
    asked: set[str] = set()
    for at, node in enumerate(tree.body):
        if isinstance(node, ast.ImportFrom) and node.module in PROGRAM_MODULES:
            asked |= {alias.name for alias in node.names if alias.name != "*"}
            renamed = [f"{a.asname} = {a.name}" for a in node.names if a.asname]
            tree.body[at] = ast.parse("; ".join(renamed) or "pass").body[0]
    # the text unchanged, with its own lines, where nothing is left out
    return (ast.unparse(tree) if asked else source), asked


def _imports(source: str) -> dict[str, str]:
    """The statement that imports a name, for each import at the top level of a solution."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return {}
    found = {}
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                found[name] = ast.unparse(ast.Import([alias]))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                text = ast.unparse(ast.ImportFrom(node.module, [alias], 0))
                names = _public(node.module) if alias.name == "*" else [alias.asname or alias.name]
                found |= dict.fromkeys(names, text)
    return found


def _public(module: str) -> list[str]:
    """Names that a star import of a library module gives; none of any other module."""
    if module.partition(".")[0] not in sys.stdlib_module_names - NOT_LIBRARY:
        return []
    found = importlib.import_module(module)
    return list(getattr(found, "__all__", [n for n in vars(found) if not n.startswith("_")]))


def _library(source: str, name: str) -> str:
    """The statement that imports a library module which the tests use without importing it. It is a
    name that only has its attributes read, all of which the module has; "" for any other name."""
    module = ALIASES.get(name, name)
    if module not in sys.stdlib_module_names - NOT_LIBRARY and name not in ALIASES:
        return ""
    tree = ast.parse(source)
    reads = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == name]
    bases = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.value in reads]
    if len(bases) != len(reads) or importlib.util.find_spec(module) is None:
        return ""
    found = importlib.import_module(module)
    whole = all(hasattr(found, base.attr) for base in bases)
    return (f"import {module} as {name}" if module != name else f"import {name}") if whole else ""


def _classes(source: str) -> set[str]:
    try:
        return {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    except (SyntaxError, ValueError):
        return set()


def _free_names(source: str) -> set[str]:
    """Names that the source reads and does not define."""
    top = symtable.symtable(source, "<tests>", "exec")
    bound = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    read = {s.get_name() for s in top.get_symbols() if s.is_referenced()}
    for table in _nested(top):
        for symbol in table.get_symbols():
            if symbol.is_global() and symbol.is_referenced():
                read.add(symbol.get_name())
            elif symbol.is_declared_global() and symbol.is_assigned():
                bound.add(symbol.get_name())
    return read - bound


def _nested(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _nested(child)


def _called(source: str) -> list[str]:
    """Names that are called, in the order of the source."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    return [call.func.id for call in calls if isinstance(call.func, ast.Name)]
