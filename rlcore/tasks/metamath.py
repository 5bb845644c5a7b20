"""Small theorems of propositional calculus to prove in Metamath: `:pp>=` is answered by `pi`."""

from __future__ import annotations

from functools import lru_cache

from rlcore.errors import UserError
from rlcore.tasks.arguments import ArgumentError, integer
from rlcore.tasks.procedural import ProceduralTask
from rlcore.tasks.proofs.attempt import Judge, Proof
from rlcore.tasks.proofs.checker import INSTALL, SET_MM, Checker
from rlcore.tasks.proofs.database import Database, UnknownSymbol, database
from rlcore.tasks.proofs.propositions import (
    ALPHABET,
    LABELS,
    RULES,
    SCHEMAS,
    assertion,
    theorems,
)
from rlcore.types import Grade, Item

REMEMBERED = 1 << 14  # verdicts: the samples of a group repeat each other


class Metamath(ProceduralTask):
    """Theorems whose worked proof has min_steps to max_steps rules, of the forms of SCHEMAS with
    formulas of up to `size` connectives over so many `variables`.

    Any proof counts, not only the worked one: reward 1 if the program metamath verifies that the
    labels prove exactly the theorem, from the rules of set.mm that the notation has letters for,
    else 0. The part "whole" says whether the answer is a sequence of known labels that leaves one
    step, so that the program was asked.
    """

    name = "metamath"

    def __init__(
        self,
        *,
        min_steps: int = 1,
        max_steps: int = 3,
        size: int = 1,
        variables: int = 3,
        timeout_s: float = 5.0,
        memory_mib: int = 256,
        seed: int = 0,
    ) -> None:
        integer("min_steps", min_steps, 1, 3)
        if integer("max_steps", max_steps, 1, 3) < min_steps:
            raise ArgumentError(
                "max_steps", max_steps, f"is below task.args.min_steps={min_steps}."
            )
        integer("size", size, 0, 1)
        integer("variables", variables, 1, 3)
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s <= 0:
            raise ArgumentError("timeout_s", timeout_s, "is not accepted: give seconds above 0.")
        integer("memory_mib", memory_mib, 16, 1 << 20)
        self.timeout_s = float(timeout_s)  # of one proof; grading it takes longer
        checker = Checker(self.name, timeout_s=timeout_s, memory_mib=memory_mib)
        self._judge = Judge(_rules(), checker)
        self._found = theorems(size, variables)
        chosen = [s for s in SCHEMAS if min_steps <= s.steps <= max_steps and self._found[s.name]]
        self._schemas = chosen
        self._verdict = lru_cache(REMEMBERED)(self._checked)
        super().__init__(
            {f"{s.name}/{size}/{variables}": len(self._found[s.name]) for s in chosen}, seed
        )

    def problem(self, stratum: int, rank: int) -> Item:
        says, proof = self._found[self._schemas[stratum].name][rank]
        return Item("", f"{says}=", proof)

    def grade(self, item: Item, response: str) -> Grade:
        proved, whole = self._verdict(item.question.removesuffix("="), response.strip())
        return Grade(float(proved), {"correct": float(proved), "whole": float(whole)})

    def _checked(self, says: str, answer: str) -> tuple[bool, bool]:
        """(is it proved, was it worth asking)."""
        if not answer or any(letter not in LABELS for letter in answer):
            return False, False
        labels = tuple(LABELS[letter] for letter in answer)
        checked = self._judge.judge(assertion(says), Proof(labels, " ".join(labels), True))
        return (False, False) if checked is None else (checked.proved, True)

    def alphabet(self) -> str | None:
        return ALPHABET


def _rules() -> Database:
    """The beginning of set.mm, which has all that the notation has letters for."""
    try:
        return database(SET_MM, (*RULES.values(), "wi", "wn"))
    except OSError as error:
        raise UserError(
            f"task metamath needs the database {SET_MM}, which cannot be read "
            f"({error.strerror}): {INSTALL} (Debian's packages)."
        ) from error
    except (UnicodeDecodeError, UnknownSymbol) as error:
        raise UserError(f"task metamath cannot use the database {SET_MM}: {error}.") from error
