"""Proofs checked by a Lean server with the interface of project-numina/kimina-lean-server
(arXiv:2504.21230).

    POST /verify {"codes": [{"custom_id", "proof"}], "timeout": seconds, "infotree_type": null}
    {"results": [{"custom_id", "error", "response": {"messages", "sorries", "time"}}]}

`messages` are those of the Lean REPL, with severity and data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aiohttp

from rlcore.extras.lean import (
    NoStatement,
    Statement,
    axioms_of,
    checked_source,
    forbidden,
    proof_in,
)
from rlcore.tasks.rewards.protocols import RewardQuery, RewardVerdict, Unjudged
from rlcore.tasks.rewards.requests import RequestReward
from rlcore.tasks.rewards.specs import LeanSpec
from rlcore.types import ScoreStatus

LATE = "REPL command timed out"  # while a proof ran, and not while its imports were loaded


class LeanReward(RequestReward[LeanSpec]):
    """1 for a proof of exactly the statement in `Asked.reference`, 0 for any other answer.

    Parts: `checked` (Lean was asked), `refused` (there is a proof, with a word that no proof
    needs), `late` (Lean's time ran out). What the server could not judge is a failed score.
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
    """Read Lean's answer on one source as a verdict. Raises Unjudged if it is no answer on the
    proof."""
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
