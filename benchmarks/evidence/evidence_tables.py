"""Statistics of `evidence.py`: intervals over seeds, the choice of a size, the table. Pure."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

Line = dict[str, Any]
Measured = Callable[[Line], float | None]
LOSS = 0.10  # of held-out accuracy: what the uncorrected arm must lose at the chosen size
LEAST = 3  # seeds: an arm with fewer is neither in a table nor in a figure
LEVEL = 0.05  # of the family of a page's differences


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95% interval by Student's t over seeds; of one value, that value.

    Example: [0.5, 0.5, 0.5] gives (0.5, 0.5, 0.5)."""
    array = np.asarray(values, dtype=np.float64)
    mean, deviation = float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else 0.0
    half = float(stats.t.ppf(0.975, len(array) - 1)) * deviation / len(array) ** 0.5
    return (mean, mean - half, mean + half) if deviation else (mean, mean, mean)


@dataclass(frozen=True)
class Difference:
    """Accuracies of two arms, paired by start: differences, and pairs that were refused."""

    values: tuple[float, ...]
    refused: int = 0

    @property
    def p(self) -> float:
        """Of the paired t-test; 1 of fewer than three pairs, which say nothing."""
        if len(self.values) < LEAST:
            return 1.0
        if len(set(self.values)) == 1:
            return float(self.values[0] == 0.0)
        return float(stats.ttest_1samp(self.values, 0.0).pvalue)

    def text(self, significant: bool) -> str:
        """Example: "**+0.200 [+0.153, +0.247]**", bold if Holm's procedure calls it significant."""
        if len(self.values) < LEAST:
            return f"{len(self.values)} pairs" if self.refused else ""
        mean, low, high = interval(self.values)
        counted = f" ({len(self.values)} pairs)" if self.refused else ""
        said = f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"
        return (f"**{said}**" if significant else said) + counted


def same_start(line: Line, other: Line) -> bool:
    """True if two runs began from the same model: by the SHA-256 of its weights, or, for lines
    without one, as far as the accuracy before the first step shows it."""
    if line.get("start") and other.get("start"):
        return bool(line["start"] == other["start"])
    (step, accuracy), (other_step, other_accuracy) = line["curve"][0], other["curve"][0]
    return step != other_step or bool(accuracy == other_accuracy)


def final(line: Line) -> float | None:
    """Accuracy at the end of a run."""
    value: float = line["final"]
    return value


def on_actors(line: Line) -> float | None:
    """Accuracy of a run's exported policy on its actors; None: it was not evaluated there."""
    return next(iter(line.get("deployed", {}).values()), None)


def paired(
    lines: Sequence[Line],
    arm: str,
    other: str,
    size: str,
    of: Measured = final,
    matched: str = "matched",
) -> Difference:
    """What is measured of `arm` minus that of `other`, for seeds that both have and whose runs
    began from the same model; other pairs are refused.

    The `matched` arm is compared at every size."""
    of_other = {line["seed"]: line for line in _at(lines, other, size, matched)}
    own = sorted(_at(lines, arm, size, matched), key=lambda line: line["seed"])
    pairs = [(line, of_other[line["seed"]]) for line in own if line["seed"] in of_other]
    kept = [(of(a), of(b)) for a, b in pairs if same_start(a, b)]
    known = tuple(a - b for a, b in kept if a is not None and b is not None)
    return Difference(known, len(pairs) - len(kept))


Contrast = tuple[str, str, str]  # arm, the other arm, size
Family = dict[Contrast, Difference]


def family(
    lines: Sequence[Line],
    references: tuple[str, str],
    further: Sequence[Contrast] = (),
    of: Measured = final,
) -> Family:
    """All differences that a page states: each arm against the matched and the uncorrected one, and
    the further contrasts that the study declares."""
    matched, uncorrected = references
    found = {}
    for arm, size in _cells(lines):
        if arm == matched:
            continue
        if arm != uncorrected and (uncorrected, size) in _cells(lines):
            found[arm, uncorrected, size] = paired(lines, arm, uncorrected, size, of, matched)
        found[arm, matched, size] = paired(lines, arm, matched, size, of, matched)
    return found | {contrast: paired(lines, *contrast, of, matched) for contrast in further}


def holm(members: Family) -> dict[Contrast, float]:
    """p-values of a family, adjusted by Holm's step-down procedure.

    Example: p of 0.01 and 0.04 give 0.02 and 0.04."""
    tested = {name: d.p for name, d in members.items() if len(d.values) >= LEAST}
    adjusted, largest = {}, 0.0
    for rank, name in enumerate(sorted(tested, key=lambda name: tested[name])):
        largest = max(largest, min(1.0, (len(tested) - rank) * tested[name]))
        adjusted[name] = largest
    return adjusted


def resolution(members: Family) -> float:
    """Median half width of the family's 95% intervals: differences below it mostly stay unseen."""
    shown = [interval(d.values) for d in members.values() if len(d.values) >= LEAST]
    return float(np.median([high - mean for mean, _, high in shown])) if shown else float("nan")


def choose(
    lines: Sequence[Line], sizes: Sequence[str], matched: str, uncorrected: str
) -> str | None:
    """The smallest size at which the uncorrected arm loses ten points or mostly collapses.

    Sizes come from small to large; None if there is no such size."""
    for size in sizes:
        losses = paired(lines, matched, uncorrected, size, matched=matched).values
        collapsed = [
            line["collapse"] is not None for line in _at(lines, uncorrected, size, matched)
        ]
        if losses and (np.mean(losses) >= LOSS or sum(collapsed) > len(collapsed) / 2):
            return size
    return None


def collapse_step(curve: Sequence[tuple[int, float]]) -> int | None:
    """Step of the first evaluation below half of the best one before it.

    Example: [(1, .2), (32, .6), (64, .25)] gives 64; [(1, .2), (32, .6), (64, .5)] gives None."""
    best = 0.0
    for step, accuracy in curve:
        if accuracy < best / 2:
            return step
        best = max(best, accuracy)
    return None


def source_digest(root: Path, sources: Sequence[str]) -> str:
    """Digest of Python sources, files or folders, that comments, docstrings and layout do not
    change."""
    digest = hashlib.sha256()
    for source in sources:
        path = root / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(str(file.relative_to(root)).encode())
            digest.update(ast.dump(_without_strings(ast.parse(file.read_text()))).encode())
    return digest.hexdigest()[:16]


def _without_strings(tree: ast.Module) -> ast.Module:
    """The tree without strings that are statements, which is what docstrings are."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]
                inner
                for inner in body
                if not (isinstance(inner, ast.Expr) and _is_string(inner.value))
            ]
    return tree


def _is_string(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def rows(
    lines: Sequence[Line],
    references: tuple[str, str],
    digest: str,
    members: Family,
    *,
    timed: bool,
    against: str = "p_ref",
) -> list[dict[str, Any]]:
    """One row an arm and size: accuracies with intervals, differences, what the mismatch was, and
    times if the runs are `timed`. Columns that no run fills are left out.

    `references`: the names of the arm at the matched size and of the uncorrected one. `against`:
    the policy that KL, ESS and acceptance compare p_inf with, p_ref or p_new."""
    adjusted = holm(members)
    made = []
    for arm, size in _cells(lines):
        own = [line for line in _runs(lines) if line["arm"] == arm and line["size"] == size]
        row = _row(own, digest)
        for other in (references[1], references[0]):
            name = (arm, other, size)
            shown = members[name].text(adjusted.get(name, 1.0) < LEVEL) if name in members else ""
            row[f"against {other}"] = shown
        row |= _distances(own, against) | {"staleness, steps": _mean(own, "staleness")}
        row |= (_times(lines, own, references[0]) if timed else {}) | _deployed(lines, own)
        made.append(row)
    empty = {n for n in made[0] if all(row[n] in ("", "0") for row in made)} if made else set()
    return [{name: cell for name, cell in row.items() if name not in empty} for row in made]


def _cells(lines: Sequence[Line]) -> list[tuple[str, str]]:
    """Arms and sizes with enough seeds to be shown, the matched arm first."""
    counted: dict[tuple[str, str], int] = {}
    for line in _runs(lines):
        counted[line["arm"], line["size"]] = counted.get((line["arm"], line["size"]), 0) + 1
    return [cell for cell, count in counted.items() if count >= LEAST]


def _row(own: Sequence[Line], digest: str) -> dict[str, Any]:
    old = sum(line["sources"] != digest for line in own)
    collapses = sum(line["collapse"] is not None for line in own)
    return {
        "arm": own[0]["arm"],
        "size": own[0]["size"],
        "seeds": f"{len(own)}" + (f" ({old} old)" if 0 < old < len(own) else ""),
        "final accuracy": _spread([line["final"] for line in own]),
        "collapses": str(collapses) if collapses else "",
    }


def _distances(own: Sequence[Line], against: str) -> dict[str, str]:
    """How far p_inf is from `against`, means over steps and seeds. A run measures its distance to
    p_new where a correction asks for it: Jackpot's acceptance."""
    if against == "p_ref":
        names = {"KL(p_inf, p_ref)": "kl", "ESS": "ess", "acceptance": "acceptance"}
        return {shown: _mean(own, key) for shown, key in names.items()}
    accepted = [
        float(np.mean(kept))
        for line in own
        if (kept := [v for v in line.get("watched", {}).get(ACCEPTANCE, ()) if v is not None])
        and "correction.jackpot.target=new" in line.get("words", ())
    ]
    return {"acceptance by p_new": f"{np.mean(accepted):.3g}" if accepted else ""}


ACCEPTANCE = "correction/jackpot/acceptance"


def _times(lines: Sequence[Line], own: Sequence[Line], matched: str) -> dict[str, str]:
    """Seconds of training, with the relative difference to the matched run of the same seed."""
    taken = {r["seed"]: r["clock"][-1] for r in _runs(lines) if r["arm"] == matched}
    relative = [100 * (r["clock"][-1] / taken[r["seed"]] - 1) for r in own if r["seed"] in taken]
    mean, low, high = interval(relative or [0.0])
    compared = f" ({mean:+.0f}% [{low:+.0f}, {high:+.0f}])" if any(relative) else ""
    return {
        "clipped sequences": _mean(own, "rapid clipped"),
        "tokens decoded a second": _mean(own, "decoded_per_s"),
        "training seconds": f"{np.mean([r['clock'][-1] for r in own]):.0f}{compared}",
    }


def _deployed(lines: Sequence[Line], own: Sequence[Line]) -> dict[str, str]:
    """A column for each exported model that any run evaluated on its actors."""
    folders = dict.fromkeys(f for line in _runs(lines) for f in line.get("deployed", ()))
    found = {f: [r["deployed"][f] for r in own if f in r.get("deployed", ())] for f in folders}
    return {f"{f} on the actors": _spread(got) if got else "" for f, got in found.items()}


def _spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds."""
    deviation = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{deviation}"


def _mean(lines: Sequence[Mapping[str, Any]], key: str) -> str:
    values = [line[key] for line in lines if line.get(key) is not None]
    return f"{np.mean(values):.3g}" if values else ""


def _runs(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if "arm" in line]


def _at(lines: Sequence[Line], arm: str, size: str, matched: str) -> list[Line]:
    """The runs of an arm at a size; the matched arm's, whose only size is another, wherever they
    are."""
    own = [line for line in _runs(lines) if line["arm"] == arm]
    here = [line for line in own if line["size"] == size]
    return own if arm == matched and not here else here
