"""A proof that was sampled: what of it the checker is asked, and what is wrong without asking."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlcore.tasks.proofs.checker import Checked, Checker
from rlcore.tasks.proofs.database import Assertion, Database

LABEL = re.compile(r"[A-Za-z0-9._-]+")
COMPRESSED = re.compile(r"[A-Z]+")
MOST_STEPS = 20_000
WIDTH = 400  # labels of one line of the small database


@dataclass(frozen=True, slots=True)
class Proof:
    """The labels that a proof names, and how it is written. Example: Proof(("wph", "id"), "wph id",
    True)"""

    labels: tuple[str, ...]
    text: str
    normal: bool  # as labels alone; otherwise compressed: ( labels ) LETTERS


def read_proof(text: str) -> Proof | None:
    """The proof in a text, with or without `$=` before and `$.` behind it. None for anything that
    holds another word than labels (and letters, compressed), such as `?`."""
    words = text.split()
    words = words[1:] if words[:1] == ["$="] else words
    words = words[:-1] if words[-1:] == ["$."] else words
    if not words or len(words) > MOST_STEPS:
        return None
    if words[0] != "(":
        if not all(map(LABEL.fullmatch, words)):
            return None
        return Proof(tuple(words), _lines(words), True)
    if words.count(")") != 1:
        return None
    end = words.index(")")
    labels, letters = words[1:end], "".join(words[end + 1 :])
    if not all(map(LABEL.fullmatch, labels)) or not COMPRESSED.fullmatch(letters):
        return None
    return Proof(tuple(labels), f"( {_lines(labels)} ) {letters}", False)


def _lines(words: Sequence[str]) -> str:
    return "\n".join(" ".join(words[i : i + WIDTH]) for i in range(0, len(words), WIDTH))


class Judge:
    """Judges proofs of theorems against a database.

    may_use: whether a theorem's proof may name an assertion of the database.
    """

    def __init__(
        self,
        database: Database,
        checker: Checker,
        may_use: Callable[[Assertion, Assertion], bool] = lambda theorem, assertion: True,
    ) -> None:
        self._database = database
        self._checker = checker
        self._may_use = may_use

    def judge(self, theorem: Assertion, proof: Proof) -> Checked | None:
        """What the checker says; None if it need not be asked: a label is unknown or may not be
        used, or steps are missing or left over."""
        if not self._known(theorem, proof) or (proof.normal and not self._whole(theorem, proof)):
            return None
        return self._checker.check(self._database.needed(theorem, proof.labels, proof.text))

    def _known(self, theorem: Assertion, proof: Proof) -> bool:
        own = {hypothesis.label for hypothesis in theorem.hypotheses}
        for label in set(proof.labels) - own - self._database.variables.keys():
            assertion = self._database.assertions.get(label)
            if assertion is None or not self._may_use(theorem, assertion):
                return False
        return True

    def _whole(self, theorem: Assertion, proof: Proof) -> bool:
        """Whether the stack never runs empty and one entry is left: a count, which costs nothing
        beside starting the checker."""
        own = {hypothesis.label for hypothesis in theorem.hypotheses}
        height = 0
        for label in proof.labels:
            taken = 0
            if label not in own and label not in self._database.variables:
                taken = self._database.arity(label)
            if taken > height:
                return False
            height += 1 - taken
        return height == 1
