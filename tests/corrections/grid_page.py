"""Writes docs/data/corrections-grid.csv, every combination, and docs/corrections-grid.md, its
summary: `PYTHONPATH=tests python tests/corrections/grid_page.py`."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path

from grid_cells import (
    AGGREGATIONS,
    ESTIMATORS,
    EXACT,
    NARROW,
    TIGHT,
    Cell,
    Chosen,
    biases,
    error,
    losses_of,
    refusal,
)
from grid_cells import lists as all_lists

DOCS = Path(__file__).parents[2] / "docs"
PAGE, DATA = DOCS / "corrections-grid.md", DOCS / "data" / "corrections-grid.csv"
HEAD = """# Every combination, enumerated

How far is the gradient that a run computes from the one that it should compute? For every list of
corrections, loss, aggregation and KL term, `tests/corrections/test_grid.py` computes both exactly:
sequences of two tokens, all of which are summed over. There is no sampling error.

**{accepted:,} rows are accepted and {refused} are refused**, each with a sentence that names the
reason. All are in [corrections-grid.csv](data/corrections-grid.csv), which a spreadsheet opens.
`PYTHONPATH=tests python tests/corrections/grid_page.py` writes it and this page.

## How to read an entry

An entry is the length of the difference, as a share of the reference's length; 0 means below
{exact:g}. Every other entry has its causes beside it, such as `truncation` or `clip`. A method
declares its causes, and the test removes them: with all of them opened the entry is 0. So an error
without a declared cause fails the test.

The sizes hold for this world and for the tight settings below, which make every threshold bind.
They do not say how large an error is in your run. `rlcore doctor` measures that.

## Reference

- Weights by token: prefix and continuation as the actor draws them, the token from p_new.
- Weights by sequence (`level=sequence` or `geometric`, `rapid`, `vesp`): the whole sequence from
  the policy that the weights lead to.
- With `dvp`: the same policies, each restricted to its safe set.
- KL terms: at the states that the actor visits, the token from p_new. `k1` and `k2` estimate the
  reverse KL, `k3` the forward KL, `full` sums over the vocabulary.

Advantages are fixed, and batch statistics are those of the whole distribution, so entries are
limits for large batches. Ranks, micro-batches and the order of a list change nothing; a test holds
that.

## Policy gradient of each correction alone

With `loss=reinforce`, which does not clip, and `token-mean`. "First" is the first step of a phase,
where p_new is p_ref; "later" is another one.

"""
TAIL = """
## Settings

{settings}.

## What to make of it

No entry is 0 above, since the settings make every threshold bind. With a wide cap, `tis` has no
bias at all, and more variance instead. So a small entry is no recommendation.
[Evidence](evidence.md) says which correction helps in which regime, and
[the referee](referee.md) computes such an entry for a loss function of your own.
"""
OWN_TERMS = [term for term in ESTIMATORS if term not in ("none", "reward")]
COLUMNS = [f"{step}, {mean}" for step, mean in product(("first", "later"), AGGREGATIONS)]
Row = tuple[str, ...]


NAMES = ["part", "corrections", "term", "loss", *COLUMNS, "causes or sentence"]


def data() -> str:
    """The CSV of everything."""
    policy = [("policy", r[0], "", *r[1:]) for r in policy_rows()]
    terms = [("term", *r) for r in kl_rows()]
    return written([*policy, *terms, *refusals()])


def refusals() -> list[Row]:
    """The refused lists, as rows of the CSV."""
    blank = [""] * len(COLUMNS)
    return [("refused", r[0], "", r[1], *blank, r[2]) for r in refused_rows()]


def written(rows: Iterable[Row]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(NAMES)
    writer.writerows(rows)
    return file.getvalue()


def page(text: str) -> str:
    """The summary of a CSV."""
    rows = list(csv.DictReader(io.StringIO(text)))
    refused = sum(row["part"] == "refused" for row in rows)
    settings = "; ".join(
        f"`{name}` " + ", ".join(f"{key}={value:g}" for key, value in values.items())
        for name, values in {**TIGHT, "algorithm": NARROW}.items()
    )
    alone = [r for r in rows if r["part"] == "policy" and ", " not in _without(r["corrections"])]
    plain = [r for r in alone if "reinforce" in r["loss"].split(", ")]
    shown = table(
        ["correction", "first", "later", "causes"],
        [
            (
                r["corrections"],
                r["first, token-mean"],
                r["later, token-mean"],
                r["causes or sentence"],
            )
            for r in plain
        ],
    )
    head = HEAD.format(exact=EXACT, accepted=len(rows) - refused, refused=refused)
    return head + shown + "\n" + TAIL.format(settings=settings)


def _without(title: str) -> str:
    """A list's names, without their settings."""
    return re.sub(r"\([^)]*\)", "", title)


def table(header: Iterable[str], rows: Iterable[Row]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def policy_rows(every: int = 1) -> list[Row]:
    """One for each list, or `every` so many, and the losses that share its entries."""
    return [
        (title(chosen), ", ".join(losses), *entries)
        for chosen in list(all_lists())[::every]
        for losses, entries in merged(
            losses_of(chosen), lambda loss, c=chosen: entries_of(c, loss, "none")
        )
    ]


def kl_rows() -> list[Row]:
    rows = []
    for chosen in all_lists():

        def of_estimator(kl: str, chosen: Chosen = chosen) -> Row:
            found = merged(("ppo", "reinforce"), lambda loss: entries_of(chosen, loss, kl))
            return tuple((", ".join(losses), *entries) for losses, entries in found)  # type: ignore

        for kls, rows_of_losses in merged(OWN_TERMS, of_estimator):
            rows += [(title(chosen), ", ".join(kls), *row) for row in rows_of_losses]
    return rows


def refused_rows() -> list[Row]:
    """The reason for which a list is refused under a loss, where one holds for all of its cells."""
    rows = []
    for chosen in all_lists():
        for losses, (reason,) in merged(
            losses_of(chosen), lambda loss, c=chosen: (reason_of(c, loss),)
        ):
            if reason:
                names = "all" if len(losses) == len(losses_of(chosen)) else ", ".join(losses)
                rows.append((title(chosen), names, reason))
    return rows


def reason_of(chosen: Chosen, loss: str) -> str:
    """Every reason among the cells of a list and a loss, whatever term is beside it."""
    found = [refusal(cell) for cell in cells_of(chosen, loss, ("none",))]
    return " ".join(dict.fromkeys(reason for reason in found if reason))


def cells_of(chosen: Chosen, loss: str, kls: Iterable[str]) -> list[Cell]:
    axes = product(kls, (False, True), AGGREGATIONS)
    return [Cell(chosen, loss, mean, later, kl) for kl, later, mean in axes]


def entries_of(chosen: Chosen, loss: str, kl: str) -> Row | None:
    """The entries and the causes; None where validation refuses all of them."""
    cells = cells_of(chosen, loss, (kl,))
    if all(refusal(cell) for cell in cells):
        return None
    sizes = [None if refusal(cell) else error(cell.case()) for cell in cells]
    off = [cell for cell, size in zip(cells, sizes) if (size or 0.0) > EXACT]
    declared = [bias.name for cell in off for bias in biases(cell.case())]
    shown = ["refused" if size is None else entry(size) for size in sizes]
    return (*shown, ", ".join(dict.fromkeys(declared)))


def entry(size: float) -> str:
    percent = 100 * size
    return "0" if size <= EXACT else f"{percent:.0f}%" if percent >= 10 else f"{percent:.2g}%"


def title(chosen: Chosen) -> str:
    """As a list in a configuration, with the settings that differ."""
    names = [
        name + ("" if not changed else f"({', '.join(f'{k}={_lower(v)}' for k, v in changed)})")
        for name, changed in chosen
    ]
    return ", ".join(names) or "none"


def _lower(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def merged(names: Iterable[str], of: Callable[[str], Row | None]) -> list[tuple[list[str], Row]]:
    """Names with the same entries together; without those that have none."""
    found: dict[Row, list[str]] = {}
    for name in names:
        entries = of(name)
        if entries:
            found.setdefault(entries, []).append(name)
    return [(together, entries) for entries, together in found.items()]


if __name__ == "__main__":
    found = data()
    DATA.write_text(found, encoding="utf-8")
    PAGE.write_text(page(found), encoding="utf-8")
