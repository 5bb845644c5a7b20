"""Small theorems of propositional calculus and their proofs, in a notation of one letter a symbol.

Formulas are in reverse Polish notation, as the syntax steps of a Metamath proof write them: `pq>`
is ( ph -> ps ), `p-` is -. ph. A theorem is `p,pq>:q`, its hypotheses and behind the colon what
follows from them. A proof is the sequence of its labels, one letter each: `pqxym` is wph wps, the
first and the second hypothesis, ax-mp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

from rlcore.tasks.proofs.database import GOAL, Assertion, Hypothesis

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
