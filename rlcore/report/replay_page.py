"""The page of a step that was executed again: its tokens in their text, and its figures.

One self-contained file in the style of report.html.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlcore.files import replace_file
from rlcore.report.page import framed

LEAST_SHADE = 0.15  # of a marked token, so that the smallest is still seen


def write_replay(out: Path, run: str, step: int, found: Mapping[str, Any]) -> Path:
    """Write the results of `rlcore replay` for a run's step. Raises OSError."""
    title = f"{run}, step {step}"
    parts = (_header(title, found), _tokens(found["tokens"]), _figures(found["figures"]))
    replace_file(out, framed(title, {"tokens": "Tokens", "step": "Figures"}, "".join(parts)))
    return out


def _header(title: str, found: Mapping[str, Any]) -> str:
    compared = sum(f["run"] is not None for f in found["figures"].values())
    differing = found["differing"]
    kind = "ill" if differing else "well"
    said = f"All {compared} figures are equal to the run's to the bit."
    if differing:
        said = f"{len(differing)} of {compared} figures differ from the run's: "
        said += ", ".join(differing)
    facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in _facts(found).items())
    return (
        f'<section class="runs"><article class="run"><h2>{escape(title)}</h2>'
        f'<p class="verdict {kind}">{escape(said)}</p><dl>{facts}</dl></article></section>'
    )


def _facts(found: Mapping[str, Any]) -> dict[str, str]:
    """The part of other settings in the step, if there are any."""
    if "cosine" not in found:
        return {}
    cosine, of = found["cosine"], found["gradient"]
    facts = {
        "changed settings": ", ".join(found["settings"]),
        "cosine of the gradients by log-probs": _number(cosine),
        "cosine of the parameters' gradients": _number(of.get("cosine")),
    }
    if of:
        norms = f"{of['executed_norm']:.6g} executed, {of['norm']:.6g} changed"
        facts["norms of the parameters' gradients"] = norms
    return facts


def _tokens(tokens: Sequence[Mapping[str, Any]]) -> str:
    if not tokens:
        return '<section id="tokens"><h2>Tokens</h2><p>No token has a slope.</p></section>'
    largest = max(t["share"] for t in tokens) or 1.0
    cards = "".join(_card(t, t["share"] / largest) for t in tokens)
    return (
        '<section id="tokens"><h2>Tokens with the largest share of the gradient</h2>'
        '<p class="soft">The share of each in the sum of |d loss / d log p_new| over all tokens of '
        f"the step. {_marked('Blue', 'blue', 0.6)}: the step makes the token likelier; "
        f"{_marked('Orange', 'orange', 0.6)}: less likely.</p>{cards}</section>"
    )


def _card(token: Mapping[str, Any], strength: float) -> str:
    colour = "blue" if token["slope"] < 0 else "orange"
    shade = LEAST_SHADE + (0.75 - LEAST_SHADE) * strength
    facts = {
        "slope": f"{token['slope']:.3g}",
        "weight": f"{token['weight']:.4g}",
        "advantage": f"{token['advantage']:.4g}",
        "sample": f"{token['group_id']}/{token['sample']}, token {token['token'] + 1}",
    }
    shown = "".join(f"<span>{name} {escape(text)}</span>" for name, text in facts.items())
    return (
        f'<article class="sample"><header><b>{token["share"]:.1%}</b>{shown}</header>'
        f'<div class="text said">{escape(token["before"])}'
        f"{_marked(token['text'], colour, shade)}{escape(token['after'])}</div></article>"
    )


def _marked(text: str, colour: str, shade: float) -> str:
    style = f"background: rgba(var(--{colour}), {shade:.2f})"
    return f'<span class="t" style="{style}">{escape(text)}</span>'


def _figures(figures: Mapping[str, Mapping[str, float | None]]) -> str:
    columns = [c for c in ("run", "again", "changed") if any(c in f for f in figures.values())]
    head = "".join(f"<th>{column}</th>" for column in columns)
    lines = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f"<td>{_number(of.get(column))}</td>" for column in columns)
        + "</tr>"
        for name, of in figures.items()
    )
    table = f"<table><tr><th>figure</th>{head}</tr>{lines}</table>"
    return f'<section id="step"><h2>Figures</h2><div class="scroll">{table}</div></section>'


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
