"""Theorems to prove in Lean 4, as in miniF2F: JSONL rows of statements, judged by a Lean server."""

from __future__ import annotations

from typing import Any

from rlcore.interfaces import Split
from rlcore.tasks.arguments import ArgumentError
from rlcore.tasks.lean_source import NoStatement, Statement
from rlcore.tasks.records import Record, RecordTask, RowError, pick_text
from rlcore.types import Grade, Item

HEADER = (
    "import Mathlib\n\nset_option maxHeartbeats 400000\n\nopen BigOperators Real Nat Topology\n"
)
INSTRUCTION = (
    "Prove this theorem in Lean 4. Give the whole theorem with its proof in one ```lean block."
)


class Lean(RecordTask):
    """Rows with `name`, `formal_statement` (a theorem that ends with `:= by`, or with sorry), and
    optionally `header`, `informal_prefix` and `split`, as miniF2F's Lean 4 files have them.

    The question is `instruction` and the statement, below `informal_prefix` where there is one. The
    reference is the Lean source up to the proof, which the reward of kind `lean` completes and has
    checked; the task has no grader of its own. train_split, heldout_split: the rows of a file whose
    `split` is this one; None: all. header: of rows that have none. `worked_field` names a column
    with proofs (what follows `:= by`), for a warm-up.
    """

    name = "lean"

    def __init__(
        self,
        *,
        statement_field: str = "formal_statement",
        header: str = HEADER,
        worked_field: str | None = None,
        train_split: str | None = None,
        heldout_split: str | None = None,
        instruction: str = INSTRUCTION,
        **files: Any,
    ) -> None:
        if not isinstance(header, str):
            raise ArgumentError("header", header, "is not accepted: give Lean source.")
        self._fields = statement_field, worked_field
        self._header = header
        self._of_split: dict[Split, str | None] = {"train": train_split, "heldout": heldout_split}
        super().__init__(instruction=instruction, **files)

    def keeps(self, split: Split, row: dict[str, Any]) -> bool:
        wanted = self._of_split[split]
        return wanted is None or row.get("split") == wanted

    def record(self, row: dict[str, Any]) -> Record:
        statement_field, worked_field = self._fields
        header = row.get("header")
        header = header if isinstance(header, str) and header.strip() else self._header
        text = pick_text(row, statement_field)
        try:
            statement = Statement.of(f"{header.rstrip()}\n\n{text}")
        except NoStatement as error:
            raise RowError(f"field {statement_field} {error}") from error
        informal = row.get("informal_prefix") or ""
        shown = f"{str(informal).strip()}\n{statement.text} by".lstrip()
        worked = None
        if worked_field:
            worked = f"```lean\n{statement.text} by\n{pick_text(row, worked_field)}\n```"
        return Record(f"```lean\n{shown}\n```", statement.source, worked, {"name": statement.name})

    def grade(self, item: Item, response: str) -> Grade:
        raise RuntimeError(
            "the task lean has no grader of its own: a reward of the kind lean judges, such as "
            "task.rewards.proof.lean.url=http://HOST:PORT, with task.grade_weight=null"
        )
