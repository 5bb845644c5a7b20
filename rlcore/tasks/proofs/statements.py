"""Theorems of a file in the form of miniF2F's Metamath folder: a block for each, with its
hypotheses, its statement, and perhaps its proof.

    ${
      name.0 $e |- ( ph -> X e. RR ) $.
      name $p |- ( ph -> ( X + 1 ) e. RR ) $= ? $.
    $}

Blocks without a proof are commented out there, some with `@` in the place of `$`; both are read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlcore.tasks.proofs.database import Assertion, Hypothesis

WRAPPED = re.compile(r"\$\(\s*(?=[$@]\{)|(?<=[$@]\})\s*\$\)")
ESCAPED = re.compile(r"(?<!\S)@(?=[{}().=edpacvf](?!\S))")
COMMENT = re.compile(r"\$\(.*?(?:\$\)|\Z)", re.DOTALL)
LABEL = re.compile(r"[A-Za-z0-9._-]+")


class BadStatement(ValueError):
    """Text that is no block of that form; the message says where."""


@dataclass(frozen=True, slots=True)
class Stated:
    """A theorem of a file; proof: as it stands there, None without one."""

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
