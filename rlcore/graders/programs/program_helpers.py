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
# A function of such a name gives back what another was given; others may give a number that happens
# to be that.
INVERSE = re.compile(r"(?i)^(un|de|from|inv|parse|load|restore)|_to_|_from_|[a-z]2[a-z]")
ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
PARTS = (ast.UnaryOp, ast.BoolOp, ast.GeneratorExp, ast.ListComp)  # of an expression that is one
VERDICTS = frozenset({"all", "any", "bool", "list", "tuple", "assertTrue", "assertFalse", "print"})
APPLIED = ("map", "filter")


def helpers(tests: str, reference: str, own: Collection[str]) -> frozenset[str]:
    """Names among `own`, which the tests use and the reference defines, that are the reference's:

    * values that it defines as literals;
    * functions that the tests call with results of another of the names, and whose own result is
      only a verdict: asserted, true or false, or ordered against a bound;
    * functions that measure such results: `score(solve(x)) == 5`. A pair that gives back what it
      was given (`decode(encode(x)) == x`) is under test. So are the functions of a type, where a
      result goes through several of them or the reference defines classes;
    * objects whose methods are called with such results, for a verdict, and with nothing else;
    * functions that are named as an oracle, where others are not.

    The others are the program's; none is a helper if no other was left.
    """
    body = ast.parse(reference).body
    kinds = {name: node for node in body for name in _defined(node) if name in own}
    literals = {n for n, node in kinds.items() if isinstance(node, ast.Assign) and _literal(node)}
    functions = {n for n, node in kinds.items() if _is_function(node)}
    uses = _Uses(_without_map(ast.parse(tests)), set(own) - literals)
    plain = not any(isinstance(node, ast.ClassDef) for node in body)
    checkers = {n for n in functions if uses.only_checks(n) or (plain and uses.measures(n))}
    checkers |= {n for n in set(kinds) - literals - functions if uses.is_judge(n)}
    oracles = {name for name in functions if ORACLE.search(name)}
    found = literals | checkers | oracles
    return frozenset(found if set(own) - found else literals if set(own) - literals else ())


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _is_function(node: ast.stmt) -> bool:
    assigned = isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda)
    return assigned or isinstance(node, ast.FunctionDef)


def _literal(node: ast.Assign) -> bool:
    return _is_literal(node.value)


class _Applied(ast.NodeTransformer):
    """`map(f, a, b)` as the list of `f(x, y)`."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        named = node.func.id if isinstance(node.func, ast.Name) else ""
        if named not in APPLIED or len(node.args) < 2:
            return node
        names = [f"_{named}_{node.lineno}_{node.col_offset}_{i}" for i in range(len(node.args) - 1)]
        call = ast.Call(node.args[0], [ast.Name(n, ast.Load()) for n in names], [])
        generators = [
            ast.comprehension(ast.Name(name, ast.Store()), each, [], 0)
            for name, each in zip(names, node.args[1:])
        ]
        return ast.ListComp(call, generators)


def _without_map(tree: ast.Module) -> ast.Module:
    found: ast.Module = ast.fix_missing_locations(_Applied().visit(tree))
    return found


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

    def measures(self, name: str) -> bool:
        """Return whether plain results of others are given to it, its results to none of them, and
        the tests compare these with more than what the others were given."""
        fed = [call for call in self._calls_of(name) if self._inputs(call) - {name}]
        sources = self._plain_sources(name, fed)
        if not sources or any(name in self._inputs(call) for call in fed):
            return False
        arguments = [a for call in sources for a in (*call.args, *call.keywords)]
        backwards = INVERSE.search(name) is not None
        given = {ast.dump(a) for a in arguments if backwards or not _is_number(a)}
        return not all(self._compared(call) & given for call in fed)

    def is_judge(self, name: str) -> bool:
        """Return whether its methods alone are called, with results of others, for a verdict."""
        judged = [
            node
            for node in self._parents
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and self._sources(node.func.value) == {name}
        ]
        if not self._plain_sources(name, judged):
            return False
        return all(
            self._inputs(call) - {name}
            and not isinstance(self._parents[call], ast.Expr)
            and self._is_verdict(call)
            for call in judged
        )

    def _plain_sources(self, name: str, fed: list[ast.Call]) -> list[ast.Call]:
        """The calls of the names whose results are given in calls of a name; [] if they are given
        such results, too, or if results of the name go anywhere."""
        names = set().union(*map(self._inputs, fed)) - {name}
        sources = [call for other in names for call in self._calls_of(other)]
        others = [call for other in self._names - {name} for call in self._calls_of(other)]
        through = any(map(self._inputs, sources)) or any(name in self._inputs(c) for c in others)
        return [] if through else sources

    def _compared(self, call: ast.AST, *, kept: bool = True) -> set[str]:
        """The values that a result is compared with, at once or (`kept`) by its variable, as text
        of their syntax."""
        node = call
        while node in self._parents and not isinstance(node, ast.Compare | ast.stmt):
            node = self._parents[node]
        if kept and isinstance(node, ast.Assign):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            reads = [n for n in self._parents if isinstance(n, ast.Name) and n.id in names]
            return set().union(*(self._compared(read, kept=False) for read in reads))
        if not isinstance(node, ast.Compare):
            return set()
        return {ast.dump(side) for side in (node.left, *node.comparators)}

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
    return any(map(_is_verdict_value, sides))


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _is_verdict_value(node: ast.expr) -> bool:
    if isinstance(node, ast.List | ast.Tuple) and node.elts:
        return all(map(_is_verdict_value, node.elts))
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


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
