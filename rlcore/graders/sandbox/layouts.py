"""Layouts of published tests, each of which is run so that it can fail.

Tests run as a script (`__name__` is "__main__"), then the tests that a test runner would collect.
These are functions and classes of pytest's naming that have not run, and classes of unittest. A
comparison that stands alone, is printed, or is returned by a function of the tests whose value is
discarded counts as an assertion. Standard library only: `pytest` is a stand-in here, with what
tests of functions use.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

AFFECT, SETTLE, CHECK, RAN = "__affect__", "__settle__", "__check__", "__ran__"
COMPARISONS = (ast.Compare, ast.BoolOp)
VERDICTS = frozenset({"all", "any"})  # functions of Python's whose discarded value is a comparison
PARAMETERS, FIXTURE = "parametrize", "is_fixture"


def compiled(source: str) -> types.CodeType:
    """Tests as `run` runs them. Raises SyntaxError."""
    tree = ast.parse(source)
    own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    rewritten = ast.fix_missing_locations(_Rewritten(own | VERDICTS).visit(tree))
    return compile(rewritten, "<tests>", "exec", dont_inherit=True)


def run(
    code: types.CodeType,
    names: dict[str, Any],
    *,
    affect: Callable[..., Any],
    settle: Callable[..., Any],
) -> None:
    """Run tests in `names`. affect: makes a call whose value is discarded. settle: is given the
    value of a comparison or statement when it is over, and returns it. Raises the tests' own
    exceptions."""
    ran: set[str] = set()
    pytest, unittest = _pytest(), _unittest(code)
    names |= {AFFECT: affect, SETTLE: settle, CHECK: _check, RAN: ran.add, "__name__": "__main__"}
    try:
        exec(code, names)
    except SystemExit as ended:  # a script's own end: what the program raises is no SystemExit here
        if ended.code:
            raise
    for name, value in list(names.items()):
        if getattr(value, "__module__", None) != "__main__":
            continue
        if unittest and isinstance(value, type) and issubclass(value, unittest.TestCase):
            _run_case(unittest, value)
        elif isinstance(value, type) and name.startswith("Test"):
            _run_class(value, names)
        elif isinstance(value, types.FunctionType) and name.startswith("test") and name not in ran:
            _run_function(value, names)
    assert pytest is sys.modules["pytest"]


def _check(value: Any) -> Any:
    """Raise AssertionError for a comparison that does not hold."""
    if isinstance(value, bool) and not value:
        raise AssertionError("a comparison of the tests does not hold")
    return value


class _Rewritten(ast.NodeTransformer):
    """Rewrites tests: calls whose value is discarded go through AFFECT, comparisons through SETTLE,
    and comparisons that nothing else would read through CHECK."""

    def __init__(self, verdicts: set[str]) -> None:
        self._verdicts = verdicts

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        value = node.value
        judged = self._judges(value)
        printed = isinstance(value, ast.Call) and _named(value) in ("print", "check", "verify")
        self.generic_visit(node)
        if isinstance(value, ast.Call):
            if printed:
                value.args = [_through(CHECK, a) if self._judges(a) else a for a in value.args]
            value.args.insert(0, value.func)
            value.func = ast.Name(AFFECT, ast.Load())
        node.value = _through(SETTLE, _through(CHECK, node.value) if judged else node.value)
        return node

    def _judges(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            name = _named(node)
            return name in self._verdicts or (name == SETTLE and self._judges(node.args[0]))
        negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        return negated or isinstance(node, COMPARISONS)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        return _through(SETTLE, node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        if node.name.startswith("test"):
            ran = ast.Call(ast.Name(RAN, ast.Load()), [ast.Constant(node.name)], [])
            node.body.insert(0, ast.Expr(ran))
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("value", "test", "iter"):
            value = getattr(node, field, None)
            if isinstance(node, STATEMENTS) and isinstance(value, ast.expr):
                setattr(node, field, _through(SETTLE, value))
        return node


STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Assert, ast.If, ast.For)


def _named(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _through(function: str, value: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(function, ast.Load()), [value], [])


def _unittest(code: types.CodeType) -> Any:
    """The module, if the tests name it, without its own runner."""
    if "unittest" not in code.co_names:
        return None
    import unittest

    unittest.main = lambda *_args, **_keywords: None  # type: ignore[assignment]
    return unittest


def _run_case(unittest: Any, case: type) -> None:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    for _, trace in result.failures + result.errors:
        raise AssertionError(trace.strip().splitlines()[-1])
    if result.unexpectedSuccesses:
        raise AssertionError("an expected failure has not failed")


def _run_class(kind: type, names: dict[str, Any]) -> None:
    for name in [n for n in dir(kind) if n.startswith("test")]:
        made = kind()
        for before in ("setup_class", "setup_method", "setUp"):
            if hasattr(made, before):
                method = getattr(made, before)
                method(*[None] * len(inspect.signature(method).parameters))
        _run_function(getattr(made, name), names)


def _run_function(function: Any, names: dict[str, Any]) -> None:
    """Run a function with every set of its parameters. Raises TypeError for an argument without a
    value."""
    for given in _parameter_sets(function):
        needed = [
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.default is p.empty and p.name not in given and p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        function(**given, **{name: _fixture(name, names) for name in needed})


def _parameter_sets(function: Any) -> Iterator[dict[str, Any]]:
    for chosen in itertools.product(*getattr(function, PARAMETERS, [])):
        given: dict[str, Any] = {}
        for part in chosen:
            given |= part
        yield given


def _fixture(name: str, names: dict[str, Any]) -> Any:
    made = names.get(name)
    if made is None or not getattr(made, FIXTURE, False):
        raise TypeError(f"nothing gives the tests {name!r}")
    needed = inspect.signature(made).parameters
    value = made(**{n: _fixture(n, names) for n in needed})
    return next(value) if inspect.isgenerator(value) else value


def _pytest() -> types.ModuleType:
    """Put the stand-in in the place of pytest."""
    found = sys.modules.get("pytest")
    if found is None:
        found = types.ModuleType("pytest")
        found.raises = Raises  # type: ignore[attr-defined]
        found.approx = Approximate  # type: ignore[attr-defined]
        found.fixture = _make_fixture  # type: ignore[attr-defined]
        found.param = lambda *values, **_: values  # type: ignore[attr-defined]
        found.main = lambda *_args, **_keywords: 0  # type: ignore[attr-defined]
        found.mark = _Mark()  # type: ignore[attr-defined]
        sys.modules["pytest"] = found
    return found


def _make_fixture(function: Any = None, **_: Any) -> Any:
    if function is None:
        return _make_fixture
    setattr(function, FIXTURE, True)
    return function


class _Mark:
    """`pytest.mark`: `parametrize`, and any other name, which has no effect here."""

    def __getattr__(self, name: str) -> Any:
        def mark(*args: Any, **_: Any) -> Any:
            return args[0] if args and callable(args[0]) else lambda function: function

        return mark

    def parametrize(self, names: Any, values: Any, **_: Any) -> Any:
        """As pytest's: `names` a text with commas or a list, `values` a list of tuples."""
        listed = re.split(r"\s*,\s*", names.strip()) if isinstance(names, str) else list(names)
        single = isinstance(names, str) and len(listed) == 1
        sets = [dict(zip(listed, [v] if single else v, strict=True)) for v in values]

        def mark(function: Any) -> Any:
            setattr(function, PARAMETERS, [*getattr(function, PARAMETERS, []), sets])
            return function

        return mark


class Raises:
    """`pytest.raises` as a context."""

    def __init__(self, expected: Any, match: str | None = None) -> None:
        self._expected = expected
        self._match = match
        self.value: Any = None
        self.type: Any = None

    def __enter__(self) -> Raises:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if kind is None:
            raise AssertionError("the program has not raised")
        if not issubclass(kind, self._expected):
            return False
        self.value = error
        self.type = kind
        if self._match is not None and not re.search(self._match, str(error)):
            raise AssertionError(f"{error} does not match {self._match}")
        return True


class Approximate:
    """`pytest.approx` of a number, a sequence or a dict."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
        self._expected = expected
        self._relative = 1e-6 if rel is None and abs is None else rel or 0.0
        self._absolute = 1e-12 if abs is None else abs

    def __eq__(self, other: object) -> bool:
        return self._close(self._expected, other)

    def _close(self, expected: Any, found: Any) -> bool:
        if isinstance(expected, dict):
            return (
                isinstance(found, dict)
                and found.keys() == expected.keys()
                and all(self._close(expected[key], found[key]) for key in expected)
            )
        if isinstance(expected, list | tuple):
            return (
                isinstance(found, list | tuple)
                and len(found) == len(expected)
                and all(map(self._close, expected, found))
            )
        if not isinstance(found, int | float | complex):
            return bool(expected == found)
        if isinstance(expected, complex) or isinstance(found, complex):
            return abs(expected - found) <= max(self._absolute, self._relative * abs(expected))
        return math.isclose(found, expected, rel_tol=self._relative, abs_tol=self._absolute)
