"""Statistics of `evidence.py`: intervals over seeds, the choice of a size, the table. Pure."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Line = dict[str, Any]
LOSS = 0.10  # of held-out accuracy: what the uncorrected arm must lose at the chosen size
NEAR = 0.95  # of the matched arm's final accuracy: the target that times are taken to
RESAMPLES = 10_000
LEAST = 5  # seeds: of fewer only the mean is shown


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Mean and the 95% bootstrap interval of the mean over seeds (percentiles).

    Example: [0.5, 0.5, 0.5] gives (0.5, 0.5, 0.5)."""
    array = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(len(array), size=(RESAMPLES, len(array)))
    low, high = np.percentile(array[draws].mean(axis=1), [2.5, 97.5])
    return float(array.mean()), float(low), float(high)


def paired(lines: Sequence[Line], arm: str, other: str, size: str) -> list[float]:
    """Final accuracy of `arm` minus that of `other`, seed by seed, for seeds that both have.

    The other arm is looked for at `size`, or at any size if it has none there (the matched arm)."""
    of_other = {line["seed"]: line["final"] for line in _at(lines, other, size)}
    own = {line["seed"]: line["final"] for line in _at(lines, arm, size)}
    return [own[seed] - of_other[seed] for seed in sorted(own) if seed in of_other]


def choose(
    lines: Sequence[Line], sizes: Sequence[str], matched: str, uncorrected: str
) -> str | None:
    """The smallest size at which the uncorrected arm loses ten points or mostly collapses.

    Sizes come from small to large; None if there is no such size."""
    for size in sizes:
        losses = paired(lines, matched, uncorrected, size)
        collapsed = [line["collapse"] is not None for line in _at(lines, uncorrected, size)]
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
    """Digest of Python sources, files or folders, that comments and layout do not change."""
    digest = hashlib.sha256()
    for source in sources:
        path = root / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(str(file.relative_to(root)).encode())
            digest.update(ast.dump(ast.parse(file.read_text())).encode())
    return digest.hexdigest()[:16]


def reaches(line: Line, target: float) -> float | None:
    """Training seconds to the first evaluation with at least this accuracy, None without one."""
    points = zip(line["curve"], line.get("clock", ()))
    return next((seconds for (_, got), seconds in points if got >= target), None)


def rows(
    lines: Sequence[Line], references: tuple[str, str], digest: str, *, timed: bool
) -> list[dict[str, Any]]:
    """One row an arm and size: accuracies with intervals, differences, what the mismatch was, and
    times if the runs are `timed`. Columns that no run fills are left out.

    `references`: the names of the arm at the matched size and of the uncorrected one."""
    made = [
        _row(lines, arm, size, references, digest)
        | (_times(lines, arm, size, references[0]) if timed else {})
        | _deployed(lines, arm, size)
        for arm, size in dict.fromkeys((line["arm"], line["size"]) for line in _runs(lines))
    ]
    empty = {name for name in made[0] if not any(row[name] for row in made)} if made else set()
    return [{name: cell for name, cell in row.items() if name not in empty} for row in made]


def _row(
    lines: Sequence[Line], arm: str, size: str, references: tuple[str, str], digest: str
) -> dict[str, Any]:
    own = [line for line in _runs(lines) if line["arm"] == arm and line["size"] == size]
    collapses = [str(line["collapse"]) for line in own if line["collapse"] is not None]
    counts = {
        "old": sum(line["sources"] != digest for line in own),
        "other start": _other_starts(own, [r for r in _runs(lines) if r["arm"] == references[0]]),
    }
    said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return {
        "arm": arm,
        "size": size,
        "seeds": f"{len(own)}" + (f" ({said})" if said else ""),
        "final accuracy": _with_interval([line["final"] for line in own]),
        "best": _with_interval([line["best"] for line in own]),
        # the matched arm has no size of its own at which to compare it with the uncorrected one
        f"against {references[1]}": (
            "" if arm == references[0] else _difference(lines, arm, references[1], size)
        ),
        f"against {references[0]}": _difference(lines, arm, references[0], size),
        "collapses at step": " ".join(collapses) or "none",
        "KL(p_inf, p_ref)": _mean(own, "kl"),
        "ESS": _mean(own, "ess"),
        "acceptance": _mean(own, "acceptance"),
        "clipped sequences": _mean(own, "rapid clipped"),
        "staleness, steps": _mean(own, "staleness"),
    }


def _other_starts(own: Sequence[Line], reference: Sequence[Line]) -> int:
    """How many runs began from another model than the reference run of their seed, as far as the
    accuracy before the first step shows it: processors differ in how a warm-up is rounded."""
    starts = {line["seed"]: tuple(line["curve"][0]) for line in reference}
    return sum(
        start[0] == line["curve"][0][0] and start[1] != line["curve"][0][1]
        for line in own
        if (start := starts.get(line["seed"]))
    )


def _times(lines: Sequence[Line], arm: str, size: str, matched: str) -> dict[str, str]:
    own = [line for line in _runs(lines) if line["arm"] == arm and line["size"] == size]
    return {
        "tokens decoded a second": _mean(own, "decoded_per_s"),
        f"training seconds to 95% of {matched}": _to_target(lines, own, matched),
        "seconds": _mean(own, "seconds"),
    }


def _deployed(lines: Sequence[Line], arm: str, size: str) -> dict[str, str]:
    """A column for each exported model that any run evaluated on its actors."""
    folders = dict.fromkeys(f for line in _runs(lines) for f in line.get("deployed", ()))
    own = [line for line in _runs(lines) if line["arm"] == arm and line["size"] == size]
    found = {f: [r["deployed"][f] for r in own if f in r.get("deployed", ())] for f in folders}
    return {f"{f} on the actors": _with_interval(got) if got else "" for f, got in found.items()}


def _to_target(lines: Sequence[Line], own: Sequence[Line], matched: str) -> str:
    """Mean time to the target with its interval, over the seeds that reach it."""
    finals = [line["final"] for line in _runs(lines) if line["arm"] == matched]
    timed = [line for line in own if line.get("clock")]
    if not finals or not timed:
        return ""
    target = NEAR * float(np.mean(finals))
    found = [s for line in timed if (s := reaches(line, target)) is not None]
    if not found:
        return "no seed"
    mean, low, high = interval(found)
    missed = "" if len(found) == len(timed) else f" ({len(timed) - len(found)} did not)"
    between = f" [{low:.0f}, {high:.0f}]" if len(found) >= LEAST else ""
    return f"{mean:.0f}{between}{missed}"


def _difference(lines: Sequence[Line], arm: str, other: str, size: str) -> str:
    differences = [] if arm == other else paired(lines, arm, other, size)
    return _with_interval(differences, sign=True) if differences else ""


def _with_interval(values: Sequence[float], sign: bool = False) -> str:
    mean, low, high = interval(values)
    form = "+.3f" if sign else ".3f"
    return f"{mean:{form}}" + (f" [{low:{form}}, {high:{form}}]" if len(values) >= LEAST else "")


def _mean(lines: Sequence[Mapping[str, Any]], key: str) -> str:
    values = [line[key] for line in lines if line.get(key) is not None]
    return f"{np.mean(values):.3g}" if values else ""


def _runs(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if "arm" in line]


def _at(lines: Sequence[Line], arm: str, size: str) -> list[Line]:
    own = [line for line in _runs(lines) if line["arm"] == arm]
    return [line for line in own if line["size"] == size] or own
