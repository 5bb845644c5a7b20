"""A diagnosis, in words, in JSON, and as an HTML page without scripts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from rlcore.dumps.measure import ALL, Measured

#: nats an answer: from here on late runs are harmed, and lose their policy (docs/step_bound.md)
HARMS, LOSES = 0.3, 1.5

#: figures that the console and the page show, and what they are
SHOWN = {
    "answers": "answers",
    "length": "tokens of an answer",
    "kl_k1": "KL(p_inf, p_ref), k1, nats a token",
    "kl_k3": "the same, k3",
    "answer_kl": "nats an answer (k3, at most 128 tokens)",
    "late_kl": "of it, what late tokens have over fresh ones",
    "tv": "total variation of p_inf and p_ref, at least",
    "ess": "effective share of the samples",
    "acceptance": "mean of min(1, p_ref/p_inf)",
    "agreement_p5": "5th percentile of min(r, 1/r), r = p_ref/p_inf",
    "ratio_p99": "99th percentile of r",
    "truncated_share": "share of tokens with r above 2",
    "masked_share": "share of tokens with r outside [0.5, 2]",
    "veto_share": "share of answers with r below 1e-4",
    "fixed_share": "share of the mismatch that repeats",
}
STYLE = """
.rlcore{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
.rlcore table{border-collapse:collapse;margin:.5rem 0 1.5rem}
.rlcore td,.rlcore th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #ddd}
.rlcore td:first-child,.rlcore th:first-child{text-align:left}
.rlcore .do{border-left:4px solid #c60;padding:.5rem 1rem;background:#fff6ea}
.rlcore .fine{border-left:4px solid #283;padding:.5rem 1rem;background:#eefaf0}
"""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A dump's figures and the advice on them. `advised`: whether something should be done."""

    rows: int
    files: Sequence[str]
    layouts: Sequence[str]
    figures: Mapping[str, Measured]  # by kind; "" is all
    advice: Sequence[str]  # sentences, the first what to do
    use: Sequence[str]  # corrections by name
    left_out: Sequence[str]  # sentences on rows that could not be read
    lacking: Mapping[str, str] = field(default_factory=dict)  # field -> what is not measured

    @property
    def advised(self) -> bool:
        return bool(self.use) or self.figures[ALL].figures.get("late_kl", 0.0) >= HARMS

    def to_json(self) -> str:
        """All of it; figures that are not finite are null."""
        return json.dumps(_finite(asdict(self) | {"advised": self.advised}), indent=1)

    def _repr_html_(self) -> str:
        return page(self)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key) or "all": _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


def lines(found: Diagnosis) -> list[str]:
    """The diagnosis in words, for a terminal."""
    told = [f"{found.rows} answers of {', '.join(found.files)} ({', '.join(found.layouts)})."]
    told += [*found.left_out, ""]
    kinds = list(found.figures)
    for name, meaning in SHOWN.items():
        values = [found.figures[kind].figures.get(name) for kind in kinds]
        if any(value is not None for value in values):
            cells = " ".join(f"{'' if v is None else f'{v:.4g}':>10}" for v in values)
            told.append(f"{meaning:<48}{cells}")
    if len(kinds) > 1:
        told.insert(
            len(found.left_out) + 2, " " * 48 + " ".join(f"{k or 'all':>10}" for k in kinds)
        )
    told += ["", *found.advice]
    told += [f"Without {name} there is no word on {why}." for name, why in found.lacking.items()]
    return told


def page(found: Diagnosis) -> str:
    """The page as text."""
    kinds = list(found.figures)
    heads = [kind or "all" for kind in kinds]
    first, *rest = found.advice
    every = found.figures[ALL]
    parts = [
        f"<h1>{found.rows} answers, {escape(', '.join(found.layouts))}</h1>",
        f'<p class="{"do" if found.advised else "fine"}">{escape(first)}</p>',
        *(f"<p>{escape(sentence)}</p>" for sentence in (*rest, *found.left_out)),
        "<h2>Distance of the actors' policy from the learner's</h2>",
        _table(
            ["", *heads],
            (
                [meaning, *(_number(found.figures[k].figures.get(name)) for k in kinds)]
                for name, meaning in SHOWN.items()
                if any(name in found.figures[k].figures for k in kinds)
            ),
        ),
        "<h2>k3 by eighths of the answers</h2>",
        _table(
            ["eighth", *heads],
            (
                [str(i + 1), *(_number(found.figures[k].by_eighth[i]) for k in kinds)]
                for i in range(len(every.by_eighth))
            ),
        ),
        *_ages(every),
        "<h2>What corrections would do, in batches of 256 answers</h2>",
        _table(
            ["correction", "kept tokens", "effective share", "cosine to none"],
            (
                [name, *(_number(v.get(key)) for key in ("kept_share", "ess", "cosine"))]
                for name, v in every.shadows.items()
            ),
        ),
        *(
            f"<p>Without {escape(name)} there is no word on {escape(why)}.</p>"
            for name, why in found.lacking.items()
        ),
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>rlcore diagnose</title>'
        f'<style>{STYLE}</style><div class="rlcore">{"".join(parts)}</div></html>'
    )


def _ages(every: Measured) -> list[str]:
    if not every.by_age:
        return []
    rows = [[str(age), str(n), _number(k3)] for age, (n, k3) in every.by_age.items()]
    heads = ["age from, optimizer steps", "tokens", "k3"]
    return ["<h2>k3 by the age of the samples</h2>", _table(heads, rows)]


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
