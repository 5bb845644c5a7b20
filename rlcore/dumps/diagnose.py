"""`rlcore diagnose FILE...`: whether the actors' policy is near enough to the learner's, what to do
where it is not, and what each correction would do with these samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.corrections.decisions import regimes_of, typical_n_star
from rlcore.corrections.step_bound import LONGEST
from rlcore.dumps.diagnosis import HARMS, LOSES, Diagnosis, lines, page
from rlcore.dumps.files import Read, read
from rlcore.dumps.measure import ALL, Measured, measure
from rlcore.dumps.rows import OPTIONAL

ADVISED = 3  # exit code
# What no dump can hold, and what it would tell.
UNREAD = {
    "the learner's hidden states, which no dump holds,": (
        "drift and this model's own N* (answers=N compares a step with a typical N*): runs of "
        "rlcore measure them at each step (mismatch/drift, mismatch/n_star)"
    )
}
LIMITS = (
    "The table comes from studies of models below 1B parameters and from worlds that are "
    "enumerated (docs/evidence.md)."
)


def diagnose(sources: Any, answers: int = 0) -> Diagnosis:
    """Diagnose the rows of files, of a DataFrame, or of a list of dicts (docs/diagnose.md).

    `answers`: of an optimizer step of the run, for N*; 0: of the dump. Raises UserError for a
    source that cannot be read, and for one without a right row.
    """
    counts = Read()
    figures, had = measure(read(sources, counts))
    every = figures[ALL].figures
    for kind in figures.values():
        kind.figures |= _per_answer(kind)
    by_table = _read_by_table(every, answers or int(every["answers"]))
    holding = regimes_of(by_table)
    use = tuple(dict.fromkeys(name for regime in holding for name in regime.use))
    told = counts.told()
    return Diagnosis(
        rows=counts.rows,
        files=tuple(counts.files),
        layouts=tuple(counts.layouts),
        figures=figures,
        advice=_advice(every, [regime.said(by_table) for regime in holding], use),
        use=use,
        left_out=tuple(told),
        lacking={name: why for name, why in OPTIONAL.items() if name not in had} | UNREAD,
    )


def _per_answer(kind: Measured) -> dict[str, float]:
    """Nats an answer: k3 of a token times the tokens of an answer, at most 128. `late_kl`: how much
    of it tokens of age 1 and more have over fresh ones, where ages are known."""
    tokens = min(kind.figures["length"], LONGEST)
    found = {"answer_kl": kind.figures["kl_k3"] * tokens}
    late = [(count, k3) for age, (count, k3) in kind.by_age.items() if age]
    if late:
        moved = sum(count * k3 for count, k3 in late) / sum(count for count, _ in late)
        fresh = kind.by_age.get(0, (0, 0.0))[1]
        found["late_kl"] = max(moved - fresh, 0.0) * tokens
        found["stale"] = float(max(kind.by_age))
    return found


def _read_by_table(figures: Mapping[str, float], answers: int) -> dict[str, float]:
    star = max(typical_n_star(figures["length"]), 1.0)
    return {"stale": 0.0, **figures, "batches_per_n_star": answers / star}


def _advice(
    figures: Mapping[str, float], holding: Sequence[str], use: Sequence[str]
) -> tuple[str, ...]:
    first = f"use {' and '.join(use)}." if use else "no correction is called for."
    told = [f"Advice: {first}"]
    late = figures.get("late_kl", 0.0)
    if late >= HARMS:
        reached = "lost their policy" if late >= LOSES else "learned less"
        told.append(
            f"Late samples are {late:.2g} nats an answer from the policy: runs {reached} from "
            f"{LOSES if late >= LOSES else HARMS:g} on, and no weight saved them; shorter steps, "
            "fewer of them in flight, or learner.step_bound do (docs/step_bound.md)."
        )
    return (*told, *holding, LIMITS)


def run(files: Sequence[str], *, answers: int, as_json: bool, out: str | None) -> int:
    """The command. Returns 0, or 3 where something should be done."""
    found = diagnose([Path(file) for file in files], answers)
    print(found.to_json() if as_json else "\n".join(lines(found)))
    if out is not None:
        Path(out).write_text(page(found), encoding="utf-8")
    return ADVISED if found.advised else 0
