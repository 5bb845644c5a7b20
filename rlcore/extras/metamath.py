"""Theorems to prove in Metamath: small ones of propositional calculus, and a user's files against
set.mm."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rlcore.errors import UserError
from rlcore.extras.metamath_checker import (
    INSTALL,
    SET_MM,
    Assertion,
    Checked,
    Checker,
    Database,
    UnknownSymbol,
    database,
)
from rlcore.extras.metamath_statements import (
    ALPHABET,
    LABELS,
    RULES,
    SCHEMAS,
    BadStatement,
    Stated,
    assertion,
    read_statements,
    theorems,
)
from rlcore.interfaces import Split, Task
from rlcore.tasks import format_prompt_id
from rlcore.tasks.arguments import ArgumentError, integer
from rlcore.tasks.procedural import ProceduralTask
from rlcore.types import Grade, Item

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


class ProofJudge:
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
        """Check a proof and return the result. None if the checker need not be run: a label is
        unknown or may not be used, or steps are missing or left over."""
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
        """Return whether the stack never runs empty and one entry is left: a count, whose cost is
        negligible next to the checker's start."""
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


REMEMBERED = 1 << 14  # verdicts: the samples of a group repeat each other


class Metamath(ProceduralTask):
    """Theorems whose worked proof has min_steps to max_steps rules, of the forms of SCHEMAS with
    formulas of up to `size` connectives over so many `variables`.

    Any proof counts, not only the worked one. The reward is 1 if the program metamath verifies that
    the labels prove exactly the theorem, else 0. The rules are the ones of set.mm that the notation
    has letters for. The part "whole" says whether the answer is a sequence of known labels that
    leaves one step, so that the program was asked.
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
        self._judge = ProofJudge(_rules(), checker)
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
        """(whether the theorem is proved, whether the checker was asked)."""
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


FENCE = re.compile(r"```[ \t]*\w*[ \t]*\n(.*?)```", re.DOTALL)
INSTRUCTION = (
    "Prove this theorem of Metamath from the database set.mm. Give the labels of the proof, in "
    "reverse Polish order with all syntax steps or compressed, in one block between ``` and ```."
)


class MetamathFile(Task):
    """`train_path` and `heldout_path` name a .mm file each, or a folder of them, of theorems in
    miniF2F's form; one may be None, its split is then empty.

    The answer is a proof, normal or compressed, in the last fenced block, or all of a response
    without one. It may use what stands in `database_path` before the theorem, all of it if the
    theorem is not in there. Files may not declare axioms, constants or variables. skip_unknown
    leaves theorems out that use symbols the database does not have, and counts them in `skipped`. A
    proof in a file is the worked answer.
    """

    name = "metamath_file"

    def __init__(
        self,
        *,
        train_path: str | None = None,
        heldout_path: str | None = None,
        database_path: str = str(SET_MM),
        instruction: str = INSTRUCTION,
        skip_unknown: bool = False,
        timeout_s: float = 5.0,
        memory_mib: int = 512,
    ) -> None:
        if train_path is None and heldout_path is None:
            why = "and task.args.heldout_path=None leave no data: give one of them."
            raise ArgumentError("train_path", None, why)
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s <= 0:
            raise ArgumentError("timeout_s", timeout_s, "is not accepted: give seconds above 0.")
        integer("memory_mib", memory_mib, 16, 1 << 20)
        self.timeout_s = float(timeout_s)  # of one proof; grading it takes longer
        checker = Checker(self.name, timeout_s=timeout_s, memory_mib=memory_mib)
        self._instruction = instruction
        self._skip = skip_unknown
        self._database = _read(database_path)
        self._judge = ProofJudge(self._database, checker, self._may_use)
        self.skipped: dict[Split, int] = {"train": 0, "heldout": 0}
        self._theorems: dict[Split, list[Stated]] = {
            "train": self._load("train", train_path),
            "heldout": self._load("heldout", heldout_path),
        }

    def _may_use(self, theorem: Assertion, assertion: Assertion) -> bool:
        """Return whether an assertion precedes the theorem in the database."""
        own = self._database.assertions.get(theorem.label)
        return own is None or assertion.place < own.place

    def _load(self, split: Split, path: str | None) -> list[Stated]:
        found = []
        for file in _files(f"{split}_path", path) if path is not None else ():
            try:
                for stated in read_statements(file.read_text(encoding="ascii")):
                    found += self._usable(split, stated)
            except (OSError, UnicodeDecodeError, BadStatement, UnknownSymbol) as error:
                why = f"cannot be used: {file.name} {error}."
                raise ArgumentError(f"{split}_path", path, why) from error
        if path is not None and not found:
            raise ArgumentError(f"{split}_path", path, "holds no theorem that can be used.")
        return found

    def _usable(self, split: Split, stated: Stated) -> list[Stated]:
        try:
            self._database.check(stated.theorem)
        except UnknownSymbol:
            if not self._skip:
                raise
            self.skipped[split] += 1
            return []
        return [stated]

    def size(self, split: Split) -> int | None:
        return len(self._theorems[split])

    def item(self, split: Split, index: int) -> Item:
        theorems = self._theorems[split]
        if not theorems:
            raise ArgumentError(f"{split}_path", None, f"leaves the {split} split empty.")
        stated = theorems[index % len(theorems)]
        theorem = stated.theorem
        lines = [f"{h.label} $e {h.text} $." for h in theorem.hypotheses]
        lines += [f"$d {' '.join(group)} $." for group in theorem.disjoint]
        lines += [f"{theorem.label} $p {theorem.text} $= ? $.", self._instruction]
        return Item(
            format_prompt_id(self.name, split, index),
            "\n".join(line for line in lines if line),
            stated.proof or "",
            {"split": split, "index": index % len(theorems)},
        )

    def grade(self, item: Item, response: str) -> Grade:
        theorem = self._theorems[item.meta["split"]][item.meta["index"]].theorem
        blocks = FENCE.findall(response)
        proof = read_proof(blocks[-1] if blocks else response)
        checked = None if proof is None else self._judge.judge(theorem, proof)
        proved = checked is not None and checked.proved
        return Grade(
            float(proved),
            {
                "correct": float(proved),
                "whole": float(checked is not None),
                "late": float(checked is not None and checked.late),
            },
        )

    def worked_answer(self, item: Item) -> str | None:
        return f"```\n{item.answer}\n```" if item.answer else None

    def alphabet(self) -> str | None:
        return None


def _read(path: str) -> Database:
    try:
        return database(Path(path).expanduser())
    except FileNotFoundError as error:
        hint = f": {INSTALL} (Debian's packages) has set.mm" if path == str(SET_MM) else ""
        raise ArgumentError("database_path", path, f"names no file{hint}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"task.args.database_path={path} cannot be read: {error}.") from error


def _files(argument: str, path: str) -> list[Path]:
    place = Path(path).expanduser()
    if place.is_dir():
        files = sorted(place.glob("*.mm"))
        if files:
            return files
        raise ArgumentError(argument, path, "is a folder without .mm files.")
    if not place.is_file():
        raise ArgumentError(argument, path, f"names no file (looked for {place.absolute()}).")
    return [place]
