"""The task `lean`: statements to prove in Lean 4, the source that is checked for an answer, and the
server that checks it.

The source is built here, never taken from the answer: the statement is the task's own, character
for character, and only what follows it is the model's. Lean reads a file from the top, so nothing
that comes after the statement can change what it says. What could change how it is checked
(commands, options, metaprograms) is refused by `forbidden`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from rlcore.interfaces import Split
from rlcore.tasks.arguments import ArgumentError
from rlcore.tasks.rewards.protocols import RewardQuery, RewardVerdict, Unjudged
from rlcore.tasks.rewards.requests import RequestReward
from rlcore.tasks.rewards.specs import LeanSpec
from rlcore.tasks.row_tasks import Record, RecordTask, RowError, pick, pick_text
from rlcore.types import Grade, Item, ScoreStatus

FENCE = re.compile(r"```[ \t]*(?:lean4?|tactics)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
DECLARED = re.compile(r"^[ \t]*(?:private |protected )?(?:theorem|lemma)\s+(\S+)", re.MULTILINE)
UNPROVED = re.compile(r":=\s*(?:by\b)?\s*(?:sorry|admit)?\s*\Z")
# A proof needs none of these. They would end the theorem and begin a command, close a scope, give
# up a goal, trust compiled code, or run the model's own program inside Lean.
WORDS = (
    "sorry|sorryAx|admit|stop|native_decide|ofReduceBool|ofReduceNat|trustCompiler|axiom|"
    "theorem|lemma|def|abbrev|example|instance|structure|inductive|class|opaque|constant|"
    "unsafe|partial|private|protected|noncomputable|variable|universe|namespace|section|end|"
    "open|import|export|macro|macro_rules|notation|infix|infixl|infixr|prefix|postfix|syntax|"
    "declare_syntax_cat|elab|elab_rules|simproc|simproc_decl|initialize|builtin_initialize|"
    "attribute|deriving|mutual|set_option|run_cmd|run_tac|run_meta|run_elab|by_elab|"
    "implemented_by|extern|reduceBool|reduceNat|local|scoped|alias|irreducible_def|"
    "add_decl_doc|register_simp_attr|init_quot"
)
# A name's last part may be such a word (`h.end`); behind `..` or a number's dot it is a word again.
FORBIDDEN = re.compile(
    rf"(?<![\w'!?])(?<![^\W\d]\.)(?:{WORDS})(?![\w'!?])|#\w+|@\[|\bdebug\.|\bskipKernelTC\b"
)
AXIOMS = re.compile(r"'(?P<name>[^'\n]+)' (?:depends on axioms: \[(?P<axioms>[^\]]*)\]|does not)")


class NoStatement(ValueError):
    """A text that declares no theorem without a proof; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A theorem to prove. Example: Statement("import Mathlib\\n", "theorem t : 1 = 1 :=", "t")"""

    before: str  # imports, options, open namespaces, definitions of the task's own
    text: str  # "theorem NAME ... :="
    name: str

    @classmethod
    def of(cls, source: str) -> Statement:
        """The statement of a Lean source that ends with a theorem whose proof is absent: `:=`, `:=
        by`, or either with sorry. Raises NoStatement."""
        found = list(DECLARED.finditer(source))
        if not found:
            raise NoStatement("declares no theorem")
        last = found[-1]
        text = source[last.start() :].rstrip()
        open_end = UNPROVED.search(text)
        if open_end is None:
            raise NoStatement(f"does not end with `:= by` after theorem {last[1]}")
        return cls(source[: last.start()], f"{text[: open_end.start()].rstrip()} :=", last[1])

    @property
    def source(self) -> str:
        """The whole source, in the form that `of` reads."""
        return f"{self.before}{self.text} by\n"


def proof_in(statement: Statement, response: str) -> str | None:
    """The proof that a response gives: what follows `:=`, beginning with `by` if it is by tactics.

    It is in the last fenced block, or all of a response without one. It stands alone or behind the
    statement repeated word for word (spaces and line ends may differ; what is before it is left
    out). None if there is none, or a theorem is stated and it is another one.
    """
    blocks = FENCE.findall(response)
    text = blocks[-1] if blocks else response
    words = r"\s+".join(map(re.escape, statement.text.removesuffix(":=").split()))
    repeated = re.search(rf"(?<!\S){words}\s*:=", text)
    if repeated:
        proof = text[repeated.end() :]
    elif DECLARED.search(text):
        return None
    else:
        lines = text.strip("\n").split("\n")
        tactics = "\n".join(f"  {line}" for line in lines)
        proof = text if re.match(r"\s*by\b", text) else f" by\n{tactics}"
    return proof.rstrip() if proof.removeprefix(" by").strip() else None


def forbidden(proof: str) -> str | None:
    """The first word of a proof that no proof needs, None without one. Comments may hold any."""
    found = FORBIDDEN.search(_without_comments(proof))
    return found[0] if found else None


def _without_comments(text: str) -> str:
    """A text without its comments; all of it if it has strings or quoted names, in which what looks
    like a comment is none."""
    if '"' in text or "«" in text:
        return text
    kept = []
    depth = at = 0
    while at < len(text):
        two = text[at : at + 2]
        if two == "/-":
            depth += 1
            at += 2
        elif two == "-/" and depth:
            depth -= 1
            at += 2
        elif two == "--" and not depth:
            line_end = text.find("\n", at)
            at = len(text) if line_end < 0 else line_end
        else:
            kept.append("" if depth else text[at])
            at += 1
    return "".join(kept)


def checked_source(statement: Statement, proof: str) -> str:
    """Build the source that Lean checks: the statement, the proof, and the question which axioms it
    rests on."""
    return f"{statement.before}{statement.text}{proof}\n\n#print axioms {statement.name}\n"


def axioms_of(statement: Statement, said: list[str]) -> frozenset[str] | None:
    """The axioms that Lean names among its messages; None unless exactly one message names the
    statement's axioms."""
    matches = [m for text in said if (m := AXIOMS.match(text.strip()))]
    own = [m for m in matches if m["name"].rpartition(".")[2] == statement.name.rpartition(".")[2]]
    if len(own) != 1:
        return None
    return frozenset(name.strip() for name in (own[0]["axioms"] or "").split(",") if name.strip())


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
    checked; the task has no own grader. train_split, heldout_split: the rows of a file whose
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
        header = str(pick(row, "header", empty=True) or "") if "header" in row else ""
        header = header if header.strip() else self._header
        text = pick_text(row, statement_field)
        try:
            statement = Statement.of(f"{header.rstrip()}\n\n{text}")
        except NoStatement as error:
            raise RowError(f"field {statement_field} {error}") from error
        informal = pick(row, "informal_prefix", empty=True) if "informal_prefix" in row else ""
        shown = f"{str(informal or '').strip()}\n{statement.text} by".lstrip()
        worked = None
        if worked_field:
            worked = f"```lean\n{statement.text} by\n{pick_text(row, worked_field)}\n```"
        return Record(f"```lean\n{shown}\n```", statement.source, worked, {"name": statement.name})

    def grade(self, item: Item, response: str) -> Grade:
        raise RuntimeError(
            "the task lean has no own grader: a reward of the kind lean judges, such as "
            "task.rewards.proof.lean.url=http://HOST:PORT, with task.grade_weight=null"
        )


# Proofs checked by a Lean server with the interface of project-numina/kimina-lean-server
# (arXiv:2504.21230).
#
#     POST /verify {"codes": [{"custom_id", "proof"}], "timeout": seconds, "infotree_type": null}
#     {"results": [{"custom_id", "error", "response": {"messages", "sorries", "time"}}]}
#
# `messages` are those of the Lean REPL, with severity and data.


LATE = "REPL command timed out"  # while a proof ran, and not while its imports were loaded


class LeanReward(RequestReward[LeanSpec]):
    """1 for a proof of exactly the statement in `Asked.reference`, 0 for any other answer.

    Parts: `checked` (Lean was asked), `refused` (there is a proof, with a word that no proof
    needs), `late` (Lean's time ran out). A proof that the server could not judge has a failed
    score.
    """

    path = "/verify"

    async def ask(
        self, session: aiohttp.ClientSession, batch: Sequence[RewardQuery]
    ) -> list[float | Unjudged | RewardVerdict]:
        read = [_read(asked) for asked in batch]
        sources = {
            str(i): checked_source(*it) for i, it in enumerate(read) if isinstance(it, tuple)
        }
        answers: dict[str, Any] = {}
        if sources:
            payload = {
                "codes": [{"custom_id": i, "proof": source} for i, source in sources.items()],
                "timeout": self._spec.proof_timeout_s,
                "infotree_type": None,
            }
            answers = await self._endpoint.post(
                session, payload, lambda data: results(data, sources)
            )
        return [
            self._verdict(it[0], answers[str(i)]) if isinstance(it, tuple) else it
            for i, it in enumerate(read)
        ]

    def _verdict(self, statement: Statement, result: dict[str, Any]) -> Unjudged | RewardVerdict:
        try:
            return verdict(statement, result, frozenset(self._spec.axioms))
        except Unjudged as e:
            return e


def _read(asked: RewardQuery) -> tuple[Statement, str] | Unjudged | RewardVerdict:
    """The statement and the answer's proof, or the verdict without asking Lean."""
    try:
        statement = Statement.of(asked.reference)
    except NoStatement as e:
        return Unjudged(f"the problem's reference {e}, so nothing can be proved")
    proof = proof_in(statement, asked.response)
    if proof is None:
        return _wrong()
    if forbidden(proof) is not None:
        return _wrong(refused=1.0)
    return statement, proof


def _wrong(**parts: float) -> RewardVerdict:
    return RewardVerdict("ok", 0.0, {"checked": 0.0, "refused": 0.0, "late": 0.0, **parts})


def results(data: Any, asked: Any) -> dict[str, Any]:
    """The server's results by id. Raises ValueError for another form."""
    listed = data.get("results") if isinstance(data, dict) else None
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise ValueError('is not an object with a list "results"')
    found = {str(one.get("custom_id")): one for one in listed}
    if found.keys() != set(asked) or len(found) != len(listed):
        raise ValueError(f"has {len(listed)} results for {len(asked)} proofs, or with other ids")
    return found


def verdict(statement: Statement, result: dict[str, Any], axioms: frozenset[str]) -> RewardVerdict:
    """Read Lean's answer on one source as a verdict. Raises Unjudged if it does not answer."""
    error = result.get("error")
    if error:
        if LATE in str(error):
            return _wrong(checked=1.0, late=1.0)
        status: ScoreStatus = "timeout" if "timed out" in str(error) else "error"
        raise Unjudged(f"the Lean server could not check a proof: {error}", status)
    said = result.get("response")
    if not isinstance(said, dict):
        raise Unjudged("the Lean server gave neither an answer nor an error on a proof")
    if "message" in said:  # of the REPL itself, which did not run the proof
        raise Unjudged(f"the Lean REPL did not run a proof: {said['message']}")
    messages = said.get("messages") or []
    if not all(isinstance(m, dict) and isinstance(m.get("data"), str) for m in messages):
        raise Unjudged("the Lean server's messages have another form")
    used = axioms_of(statement, [m["data"] for m in messages if m.get("severity") == "info"])
    proved = (
        not any(m.get("severity") == "error" for m in messages)
        and not said.get("sorries")
        and used is not None
        and used <= axioms
    )
    return RewardVerdict("ok", float(proved), {"checked": 1.0, "refused": 0.0, "late": 0.0})
