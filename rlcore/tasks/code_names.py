"""Which names of a row's tests are the program's own: what is really under test."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Collection, Iterator


class BadTests(ValueError):
    """Tests that cannot judge a program; the message says why."""


def names_under_test(tests: str, reference: str, given: Collection[str]) -> list[str]:
    """Names that the tests use and that the program must define.

    These are what the reference solution defines, and what neither Python nor the preamble (its
    names are `given`) nor the tests themselves define. Everything else in the tests, `set` and
    `sorted` among it, means what it means in Python, whatever the program does to it.

    Without a reference a function under test may have the name of one that is given (`gcd`): if
    there is no other candidate, it is what the tests call first. Raises BadTests for tests that
    are not Python or that use nothing of a program.
    """
    try:
        used = _free_names(tests)
    except SyntaxError as error:
        raise BadTests(f"not Python: {error}") from error
    own = _defined(reference) & used
    known = set(given) | set(dir(builtins))
    found = own | (used - known)
    if not found:
        called = [name for name in _called(tests) if name in used]
        found = set([*(n for n in called if n in given), *called][:1])
    if not found:
        raise BadTests("they use no name that a program could define")
    return sorted(found)


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


def _defined(source: str) -> set[str]:
    """Names that a solution defines at its top level, imports aside; none if it is not Python."""
    try:
        table = symtable.symtable(source, "<reference>", "exec")
    except (SyntaxError, ValueError):
        return set()
    return {s.get_name() for s in table.get_symbols() if s.is_assigned() and not s.is_imported()}


def _called(source: str) -> list[str]:
    """Names that are called, in the order of the source."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    return [call.func.id for call in calls if isinstance(call.func, ast.Name)]
