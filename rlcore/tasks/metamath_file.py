"""Theorems of a user's files to prove in Metamath, against set.mm: miniF2F's Metamath folder."""

from __future__ import annotations

import re
from pathlib import Path

from rlcore.errors import UserError
from rlcore.interfaces import Split, Task
from rlcore.tasks import format_prompt_id
from rlcore.tasks.arguments import ArgumentError, integer
from rlcore.tasks.proofs.attempt import Judge, read_proof
from rlcore.tasks.proofs.checker import INSTALL, SET_MM, Checker
from rlcore.tasks.proofs.database import Assertion, Database, UnknownSymbol, database
from rlcore.tasks.proofs.statements import BadStatement, Stated, read_statements
from rlcore.types import Grade, Item

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
        self._judge = Judge(self._database, checker, self._may_use)
        self.skipped: dict[Split, int] = {"train": 0, "heldout": 0}
        self._theorems: dict[Split, list[Stated]] = {
            "train": self._load("train", train_path),
            "heldout": self._load("heldout", heldout_path),
        }

    def _may_use(self, theorem: Assertion, assertion: Assertion) -> bool:
        """Whether an assertion stands before the theorem."""
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
