"""Statements to prove in Metamath: a file's own, and generated ones of propositional calculus."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import product

from rlcore.extras.metamath_checker import GOAL, Assertion, Hypothesis

WRAPPED = re.compile(r"\$\(\s*(?=[$@]\{)|(?<=[$@]\})\s*\$\)")
ESCAPED = re.compile(r"(?<!\S)@(?=[{}().=edpacvf](?!\S))")
COMMENT = re.compile(r"\$\(.*?(?:\$\)|\Z)", re.DOTALL)
LABEL = re.compile(r"[A-Za-z0-9._-]+")


# Theorems of a file in the form of miniF2F's Metamath folder: a block for each, with its
# hypotheses, its statement, and perhaps its proof.
#
#     ${
#       name.0 $e |- ( ph -> X e. RR ) $.
#       name $p |- ( ph -> ( X + 1 ) e. RR ) $= ? $.
#     $}
#
# Blocks without a proof are commented out there, some with `@` in the place of `$`; both are read.


class BadStatement(ValueError):
    """Text that is not a block of that form; the message says where."""


@dataclass(frozen=True, slots=True)
class Stated:
    """A theorem of a file; proof: its text there, None without one."""

    theorem: Assertion
    proof: str | None = None


def read_statements(text: str) -> list[Stated]:
    """The theorems of a text, in their order. Raises BadStatement."""
    text = ESCAPED.sub("$", WRAPPED.sub(" ", text))
    words = COMMENT.sub(" ", text).split()
    return _Reader(words).read()


class _Reader:
    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._at = 0
        self._scopes: list[tuple[list[Hypothesis], list[tuple[str, ...]]]] = [([], [])]

    def read(self) -> list[Stated]:
        found = []
        while self._at < len(self._words):
            word = self._next()
            if word == "${":
                hypotheses, disjoint = self._scopes[-1]
                self._scopes.append((list(hypotheses), list(disjoint)))
            elif word == "$}":
                if len(self._scopes) == 1:
                    raise BadStatement("has a $} without its ${")
                self._scopes.pop()
            elif word == "$d":
                self._scopes[-1][1].append(tuple(self._until("$.")))
            elif LABEL.fullmatch(word):
                found += self._labelled(word)
            else:
                raise BadStatement(f"has {word}, where a label, $d, ${{ or $}} is expected")
        return found

    def _labelled(self, label: str) -> list[Stated]:
        kind = self._next() if self._at < len(self._words) else ""
        hypotheses, disjoint = self._scopes[-1]
        if kind == "$e":
            hypotheses.append(Hypothesis(label, " ".join(self._until("$."))))
            return []
        if kind != "$p":
            raise BadStatement(
                f"declares {label} by {kind or 'nothing'}: only $e, $p and $d may be"
            )
        says = " ".join(self._until("$="))
        proof = " ".join(self._until("$.", "$}"))
        known = proof if proof and "?" not in proof.split() else None
        return [Stated(Assertion(label, says, tuple(hypotheses), tuple(disjoint)), known)]

    def _until(self, end: str, or_before: str = "") -> list[str]:
        """The words up to `end`; `or_before` ends them too and stays."""
        words: list[str] = []
        while self._at < len(self._words):
            word = self._next()
            if word == end:
                return words
            if word == or_before:
                self._at -= 1
                return words
            if word.startswith("$"):
                raise BadStatement(f"has {word} where {end} is expected")
            words.append(word)
        raise BadStatement(f"ends where {end} is expected")

    def _next(self) -> str:
        self._at += 1
        return self._words[self._at - 1]


VARIABLES = {"p": "ph", "q": "ps", "r": "ch"}
CONNECTIVES = {">": "wi", "-": "wn"}
HYPOTHESES = {letter: f"{GOAL}.{i}" for i, letter in enumerate("xyz", 1)}
RULES = {
    "m": "ax-mp",
    "1": "ax-1",
    "2": "ax-2",
    "3": "ax-3",
    "i": "id",
    "a": "a1i",
    "s": "syl",
    "c": "com12",
    "n": "pm2.21",
    "k": "con3i",
}
SYNTAX = {letter: f"w{name}" for letter, name in VARIABLES.items()} | CONNECTIVES
LABELS = SYNTAX | HYPOTHESES | RULES
ALPHABET = "".join(LABELS) + ",:="


# Small theorems of propositional calculus and their proofs, in a notation of one letter a symbol.
#
# Formulas are in reverse Polish notation, as the syntax steps of a Metamath proof write them: `pq>`
# is ( ph -> ps ), `p-` is -. ph. A theorem is `p,pq>:q`, its hypotheses and behind the colon what
# follows from them. A proof is the sequence of its labels, one letter each: `pqxym` is wph wps, the
# first and the second hypothesis, ax-mp.


@dataclass(frozen=True, slots=True)
class Schema:
    """Theorems of one form. A, B and C stand for any formulas; `steps` counts the rules.

    Example: Schema("mp", "A,AB>:B", "ABxym")
    """

    name: str
    says: str
    proof: str

    @property
    def letters(self) -> list[str]:
        return sorted({c for c in self.says if c.isupper()})

    @property
    def steps(self) -> int:
        return sum(letter in RULES for letter in self.proof)

    def instance(self, formulas: dict[str, str]) -> tuple[str, str]:
        """(theorem, proof) with formulas in the places of the letters."""
        table = str.maketrans(formulas)
        return self.says.translate(table), self.proof.translate(table)


# Where two forms share a theorem, the earlier has it.
SCHEMAS = (
    Schema("id", ":AA>", "Ai"),
    Schema("ax-1", ":ABA>>", "AB1"),
    Schema("ax-2", ":ABC>>AB>AC>>>", "ABC2"),
    Schema("ax-3", ":A-B->BA>>", "AB3"),
    Schema("pm2.21", ":A-AB>>", "ABn"),
    Schema("mp", "A,AB>:B", "ABxym"),
    Schema("a1i", "A:BA>", "ABxa"),
    Schema("syl", "AB>,BC>:AC>", "ABCxys"),
    Schema("com12", "ABC>>:BAC>>", "ABCxc"),
    Schema("con3i", "AB>:B-A->", "ABxk"),
    Schema("a1i id", ":BAA>>", "AA>BAia"),
    Schema("mp mp", "A,AB>,BC>:C", "BCABxymzm"),
    Schema("mp a1i", "A,AB>:CB>", "BCABxyma"),
    Schema("syl con3i", "AB>,BC>:C-A->", "ACABCxysk"),
    Schema("a1i a1i", "A:BCA>>", "CA>BACxaa"),
    Schema("pm2.21 mp", "A-:AB>", "A-AB>xABnm"),
    Schema("syl syl", "AB>,BC>,CA>:AA>", "ACAABCxyszs"),
)


@cache
def formulas(size: int, variables: int) -> tuple[str, ...]:
    """Formulas of up to `size` connectives, the small ones first."""
    levels: list[list[str]] = [list(VARIABLES)[:variables]]
    for connectives in range(1, size + 1):
        level = [f"{one}-" for one in levels[connectives - 1]]
        for left in range(connectives):
            right = levels[connectives - 1 - left]
            level += [f"{a}{b}>" for a, b in product(levels[left], right)]
        levels.append(level)
    return tuple(formula for level in levels for formula in level)


@cache
def theorems(size: int, variables: int) -> dict[str, tuple[tuple[str, str], ...]]:
    """(theorem, proof) of every instance of every schema with such formulas, each theorem once."""
    seen: set[str] = set()
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    for schema in SCHEMAS:
        own = []
        for chosen in product(formulas(size, variables), repeat=len(schema.letters)):
            says, proof = schema.instance(dict(zip(schema.letters, chosen, strict=True)))
            if says not in seen:
                seen.add(says)
                own.append((says, proof))
        found[schema.name] = tuple(own)
    return found


def infix(formula: str) -> str:
    """A formula as set.mm writes it: `pq>` is ( ph -> ps )."""
    stack: list[str] = []
    for letter in formula:
        if letter == "-":
            stack.append(f"-. {stack.pop()}")
        elif letter == ">":
            right = stack.pop()
            stack.append(f"( {stack.pop()} -> {right} )")
        else:
            stack.append(VARIABLES[letter])
    (whole,) = stack
    return whole


def assertion(says: str) -> Assertion:
    """A theorem as Metamath has it."""
    before, _, conclusion = says.partition(":")
    hypotheses = tuple(
        Hypothesis(label, f"|- {infix(formula)}")
        for label, formula in zip(HYPOTHESES.values(), before.split(",") if before else ())
    )
    return Assertion(GOAL, f"|- {infix(conclusion)}", hypotheses)
