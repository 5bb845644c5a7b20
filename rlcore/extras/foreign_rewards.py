"""Reward functions of a script, cut out of it with what they use into a file that loads. A script
that builds a trainer when it is imported cannot be a grader. Read by ast, not run."""

from __future__ import annotations

import ast
import builtins
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from rlcore.extras.foreign_translator import Left, Translation

_KEY = "task.args.grader"


def cut_out(found: Translation, path: str, target: Path) -> Translation:
    """The translation with graders of the script `path` taken from `target`, which is written.

    Functions that need a package which is not installed, such as trl, are left to the user.
    """
    graders = found.values.get(_KEY)
    listed = graders if isinstance(graders, list) else [graders]
    named = [str(g) for g in listed if g is not None]
    inside = [g.removeprefix(f"{path}:") for g in named if g.startswith(f"{path}:")]
    text = ""
    missing: list[str] = []
    if inside:
        text, missing = source_of(Path(path).read_text(encoding="utf-8"), inside)
    missing += [g for g in named if not _there(g)]
    if missing:
        reason = f"{', '.join(missing)} cannot be imported here: install it, or give {_KEY}"
        values = {k: v for k, v in found.values.items() if not k.startswith(_KEY)}
        return found._replace(values=values, left=[*found.left, Left(_KEY, graders, reason)])
    if not inside:
        return found
    target.write_text(text, encoding="utf-8")
    moved = [f"{target}:{g.removeprefix(f'{path}:')}" if g.startswith(path) else g for g in named]
    values = found.values | {_KEY: moved if isinstance(graders, list) else moved[0]}
    return found._replace(values=values)


def _there(grader: str) -> bool:
    """False for a function of a module whose package is not installed."""
    module = grader.rpartition(":")[0]
    return module.endswith(".py") or "/" in module or _installed(module)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def source_of(text: str, names: Iterable[str]) -> tuple[str, list[str]]:
    """A module with these functions of a script and all that they use, in the script's order, and
    the modules among it that are not installed."""
    tree = ast.parse(text)
    where: dict[str, list[ast.stmt]] = {}
    for statement in _statements(tree.body):
        for name in _defined(statement):
            where.setdefault(name, []).append(statement)
    wanted, taken = list(names), set[int]()
    while wanted:
        for statement in where.pop(wanted.pop(), []):
            if statement.lineno not in taken:
                taken.add(statement.lineno)
                wanted += _used(statement)
    kept = [s for s in _statements(tree.body) if s.lineno in taken or _future(s)]
    modules = {m for s in kept if s.lineno in taken for m in _modules(s)}
    parts = [ast.get_source_segment(text, s, padded=False) or "" for s in kept]
    parts = [_decorated(text, s, part) for s, part in zip(kept, parts, strict=True)]
    return "\n\n\n".join(parts) + "\n", sorted(m for m in modules if not _installed(m))


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Those of a module, and those within `if`, `try` and `with` of its top level."""
    found: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.If | ast.Try | ast.With):
            found += _statements(statement.body)
        else:
            found.append(statement)
    return found


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import):
        return [a.asname or a.name.partition(".")[0] for a in statement.names]
    if isinstance(statement, ast.ImportFrom):
        return [a.asname or a.name for a in statement.names]
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        targets = [statement.target]
    return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]


def _used(statement: ast.stmt) -> list[str]:
    names = (n.id for n in ast.walk(statement) if isinstance(n, ast.Name))
    return [name for name in names if not hasattr(builtins, name)]


def _modules(statement: ast.stmt) -> list[str]:
    """Modules that a statement imports, within functions, too."""
    found = []
    for node in ast.walk(statement):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


def _future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _decorated(text: str, statement: ast.stmt, segment: str) -> str:
    """A statement's lines with its decorators, without the indentation of an `if` around it."""
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(d.lineno for d in decorators)])
    lines = text.splitlines()[first - 1 : statement.end_lineno]
    indent = len(lines[0]) - len(lines[0].lstrip())
    if indent == 0 and not decorators:
        return segment
    return "\n".join(line[indent:] for line in lines)
