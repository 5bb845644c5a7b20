"""Names of a reference that its tests use to check results: `helpers`.

A row's tests may check with what its solution defines: `assert is_valid(solve(4))`. A program that
was asked for `solve` need not define `is_valid`, and must not replace it by one that accepts
anything. The names are found by how the tests use them.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterator

# A function of such a name is there to compare the one under test with.
ORACLE = re.compile(r"(?i)(^|_)(brute|naive|slow|oracle|reference|ref|expected|ground)(_|$|force)")
ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
PARTS = (ast.UnaryOp, ast.BoolOp, ast.GeneratorExp, ast.ListComp)  # of an expression that is one
VERDICTS = frozenset({"all", "any", "bool", "assertTrue", "assertFalse", "print"})


def helpers(tests: str, reference: str, own: Collection[str]) -> frozenset[str]:
    """Names among `own`, which the tests use and the reference defines, that are the reference's:

    * values that it defines as literals;
    * functions that the tests call with results of another of the names, and whose own result is
      only a verdict: asserted, true or false, or ordered against a bound;
    * functions that are named as an oracle, where others are not.

    The others are the program's; none is a helper if no other was left.
    """
    body = ast.parse(reference).body
    functions = {n.name for n in body if isinstance(n, ast.FunctionDef) and n.name in own}
    literals = {
        target.id
        for node in body
        if isinstance(node, ast.Assign) and _is_literal(node.value)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in own
    }
    uses = _Uses(ast.parse(tests), set(own) - literals)
    checkers = {name for name in functions if uses.only_checks(name)}
    oracles = {name for name in functions if ORACLE.search(name)}
    found = literals | checkers | oracles
    return frozenset(found if set(own) - found else literals if set(own) - literals else ())


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


class _Uses:
    """How tests use names of the program."""

    def __init__(self, tree: ast.AST, names: set[str]) -> None:
        self._names = names
        self._parents = {
            child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)
        }
        self._origins: dict[str, set[str]] = defaultdict(set)  # of variables: names they come from
        flows = list(_flows(tree))
        before = -1
        while before != (size := sum(map(len, self._origins.values()))):
            before = size
            for variable, value in flows:
                self._origins[variable] |= self._sources(value)
        self._calls = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        ]

    def _sources(self, value: ast.AST) -> set[str]:
        """The names that a value comes from."""
        found: set[str] = set()
        for node in ast.walk(value):
            if isinstance(node, ast.Name):
                found |= {node.id} if node.id in self._names else self._origins[node.id]
        return found

    def only_checks(self, name: str) -> bool:
        """Return whether results of others are given to it, its results to none of them, and these
        are only verdicts."""
        fed = [call for call in self._calls_of(name) if self._inputs(call) - {name}]
        others = [call for other in self._names - {name} for call in self._calls_of(other)]
        if not fed or any(name in self._inputs(call) for call in others):
            return False
        return all(map(self._is_verdict, fed))

    def _calls_of(self, name: str) -> list[ast.Call]:
        return [call for call in self._calls if self._sources(call.func) == {name}]

    def _inputs(self, call: ast.Call) -> set[str]:
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        return set().union(*map(self._sources, arguments))

    def _is_verdict(self, call: ast.expr) -> bool:
        node: ast.AST = call
        while True:
            child, node = node, self._parents[node]
            if isinstance(node, ast.Assert | ast.If | ast.While | ast.Expr):
                return True
            if isinstance(node, ast.Compare):
                return _against_a_bound(node)
            if isinstance(node, ast.Call):
                called = node.func
                named = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
                if child is called or named not in VERDICTS:
                    return False
            elif isinstance(node, ast.IfExp):
                return child is node.test
            elif isinstance(node, ast.Assign):
                return child is call and all(map(self._is_kept_verdict, node.targets))
            elif not isinstance(node, PARTS):
                return False

    def _is_kept_verdict(self, target: ast.expr) -> bool:
        """Return whether a variable that holds a verdict is only read as one."""
        if not isinstance(target, ast.Name):
            return False
        reads = [
            node
            for node in self._parents
            if isinstance(node, ast.Name) and node.id == target.id and node is not target
        ]
        return all(isinstance(read.ctx, ast.Load) and self._is_verdict(read) for read in reads)


def _against_a_bound(node: ast.Compare) -> bool:
    if all(isinstance(operator, ORDER) for operator in node.ops):
        return True
    sides = [node.left, *node.comparators]
    return any(isinstance(s, ast.Constant) and isinstance(s.value, bool) for s in sides)


def _flows(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(variable, a value that it may have)."""
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    for node in ast.walk(tree):
        pairs: list[tuple[ast.AST, ast.AST]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value:
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.For | ast.comprehension):
            pairs = [(node.target, node.iter)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called = functions.get(node.func.id)
            if called is not None:
                names = [argument.arg for argument in called.args.args]
                yield from zip(names, node.args)
                yield from ((k.arg, k.value) for k in node.keywords if k.arg)
        for target, value in pairs:
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    yield name.id, value
