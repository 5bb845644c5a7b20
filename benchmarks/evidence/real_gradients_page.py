"""Sums up the sketches of `real_gradients.py` and writes its page: tables, figure, verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.evidence.estimator_lab_page import n_star
from benchmarks.evidence.evidence_page import COLOURS, PAGES, panels, replace_block
from benchmarks.harness import table

Found = Mapping[str, Any]
Vectors = NDArray[np.float32]
PAGE = PAGES / "real-gradients.md"
SHOWN = ("tis C=5", "ais", "jackpot")
LARGER = {"first": "whole", "stale": "whole stale"}  # the same actors on more prompts
MISMATCHED = ("fp8", "int4", "floor", "stale 32")
TITLES = {"fp8": "FP8", "int4": "INT4", "floor": "floor 1e-6", "stale 32": "32 steps stale"}


def squared(parts: Vectors) -> tuple[float, float]:
    """|E d|^2 of independent vectors [P, D], from pairs of different ones, and the standard error
    of that over the vectors (delete-one jackknife)."""
    gram = parts.astype(float) @ parts.astype(float).T
    count = len(gram)
    off = gram - np.diag(np.diag(gram))
    whole = off.sum() / (count * (count - 1))
    without = (off.sum() - 2 * off.sum(1)) / ((count - 1) * (count - 2))
    error = math.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    return float(whole), error


def spread(parts: Vectors, answers: int) -> float:
    """Variance of one answer, from the means of `answers` of each prompt [P, D]."""
    return float(answers * parts.astype(float).var(0, ddof=1).sum())


def spread_ratio(parts: Vectors, others: Vectors) -> tuple[float, float]:
    """The variance of vectors [P, D] over that of others, and its standard error over the prompts
    (delete-one jackknife)."""
    ones, theirs = _variances(parts), _variances(others)
    without = ones[1:] / theirs[1:]
    count = len(parts)
    error = math.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    return float(ones[0] / theirs[0]), error


def _variances(parts: Vectors) -> NDArray[np.float64]:
    """[1 + P]: the variance of vectors [P, D], of all and then without each."""
    x, n = parts.astype(float), len(parts)
    total, squares = x.sum(0), (x**2).sum(1)
    all_of = (squares.sum() - total @ total / n) / (n - 1)
    rest = total - x
    without = (squares.sum() - squares - (rest**2).sum(1) / (n - 1)) / (n - 2)
    return np.concatenate([[all_of], without])


def summed_up(vectors: Mapping[str, Vectors], answers: int) -> dict[str, Any]:
    """Squared biases and variances of each actor's estimators, relative to |gradient|^2.

    vectors: "actor/estimator" -> [P, D], the mean over a prompt's answers. The gradient is that of
    the matched actor's answers; a bias is against the untruncated sequence ratio on the same
    answers, which has none."""
    gradient, error = squared(vectors["matched/none"])
    found: dict[str, Any] = {"gradient2": gradient, "gradient2_error": error, "actors": {}}
    for actor in dict.fromkeys(key.split("/")[0] for key in vectors):
        own = {k.split("/")[1]: v for k, v in vectors.items() if k.split("/")[0] == actor}
        unbiased = own["sequence IS"]
        arms = {}
        for name, parts in own.items():
            bias2, bias2_error = squared(parts - unbiased)
            arms[name] = {
                "bias2": bias2 / gradient,
                "bias2_error": bias2_error / gradient,
                "variance": spread(parts, answers) / gradient,
                "variance / none's": spread_ratio(parts, own["none"]),
                "cosine": _cosine(parts, vectors["matched/none"]),
            }
        check, check_error = squared(unbiased - vectors["matched/none"])
        full = own["jackpot"] - unbiased
        found["actors"][actor] = {
            "arms": arms,
            "unbiased against matched": [check / gradient, check_error / gradient],
            "changed by k=20": {
                name: _length(own[name] - own["jackpot"]) / (_length(full) + 1e-300)
                for name in own
                if name.startswith("jackpot, ")
            },
        }
    return found


def _length(parts: Vectors) -> float:
    return float(np.linalg.norm(parts.astype(float).mean(0)))


def _cosine(parts: Vectors, others: Vectors) -> float:
    a, b = parts.astype(float).mean(0), others.astype(float).mean(0)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b) + 1e-300))


def write_page(lines: Sequence[Found], sizes: Mapping[str, int]) -> None:
    """sizes: blocks of each part, the order of the page."""
    results = {line["part"]: line["results"] for line in lines if "results" in line}
    replace_block(PAGE, block(lines, sizes))
    found = {
        a: results[p]["actors"][a]
        for p in sizes
        if p in results
        for a in MISMATCHED
        if a in results[p]["actors"] and p != "long"
    }
    if found:
        draw(PAGES / "real-gradients.svg", found)


def block(lines: Sequence[Found], sizes: Mapping[str, int]) -> str:
    """The blocks that were run, and of each part, unless a larger one has its actors, its verdicts
    and two tables; of one whose gates are not met the gates alone."""
    results = {line["part"]: line["results"] for line in lines if "results" in line}
    of = {p: [line for line in lines if line["part"] == p and "block" in line] for p in sizes}
    counts = ", ".join(f"`{part}` {len(of[part])} of {n}" for part, n in sizes.items())
    parts = [f"Blocks run: {counts}."]
    if results:
        parts.append("![Error of the gradient over the batch, by actor](real-gradients.svg)")
    for name in (p for p in sizes if p in results and LARGER.get(p) not in results):
        found, own = results[name], of[name]
        parts.append(f"**Part `{name}`** ({_size(own, found)}):")
        said = verdicts(found, own)
        if any(v == "no" for h, v in said.items() if h.startswith("gate")):
            parts.append("\n".join(f"- {h}: {v}" for h, v in said.items() if h.startswith("gate")))
            continue  # it says nothing of its hypotheses
        parts.append("\n".join(f"- {h}: {v}" for h, v in said.items()))
        parts.append(table([_row(a, found["actors"][a], own) for a in found["actors"]]))
        parts.append(table([_kept(a, own) for a in found["actors"]]))
    return "\n\n".join(parts)


def _size(own: Sequence[Found], found: Found) -> str:
    error = found["gradient2_error"] / found["gradient2"]
    minutes = sum(line["seconds"] for line in own) / 60
    return (
        f"{8 * len(own)} prompts; the gradient's squared length is known to {error:.0%}; "
        f"{minutes:.0f} minutes of a shared core"
    )


def mean(own: Sequence[Found], actor: str, figure: str) -> float:
    return float(np.mean([line["actors"][actor][figure] for line in own]))


def verdicts(found: Found, own: Sequence[Found]) -> dict[str, str]:
    """The registered gates and hypotheses that a part has the actors of, and what came out."""
    actors = found["actors"]
    checks = [actors[a]["unbiased against matched"] for a in actors if a != "matched"]
    said = {
        "gate, the sequence ratio agrees with the matched actor within two errors": _yes(
            all(abs(value) <= 2 * error for value, error in checks)
        ),
        "gate, the gradient is seen (its squared length is above two errors)": _yes(
            found["gradient2"] > 2 * found["gradient2_error"]
        ),
    }
    if "int4" in actors:
        said |= _rounding(actors) | _floor(actors, own)
    if "stale 32" in actors:
        star = _star(actors["stale 32"]["arms"], "tis C=10")[0]
        said["32 steps stale, N\\* of TIS (C = 10) is below 64"] = _yes(star < 64)
    changed = [actors[a]["changed by k=20"]["jackpot, k=20"] for a in actors if a != "matched"]
    said["k = 20 with the residual tail changes Jackpot's bias by less than 2%"] = (
        f"{_yes(max(changed) < 0.02)} (at most {max(changed):.2%})"
    )
    return said


def _rounding(actors: Found) -> dict[str, str]:
    stars = [_star(actors[a]["arms"], "tis C=10")[0] for a in ("fp8", "int4")]
    ais, tis = (_error(actors["int4"]["arms"], name, 64) for name in ("ais", "tis C=5"))
    return {
        "N\\* of TIS (C = 10) is 30 to 270 under FP8 and INT4": _yes(
            all(30 <= star <= 270 for star in stars)
        ),
        "at 64 answers and INT4 the error of AIS is within 10% of that of TIS (C = 5)": (
            f"{_yes(abs(ais / tis - 1) < 0.1)} ({ais / tis - 1:+.1%})"
        ),
    }


def _floor(actors: Found, own: Sequence[Found]) -> dict[str, str]:
    counted = mean(own, "floor", "floor_tokens")
    expected = mean(own, "floor", "tokens") * 49_152e-6 / (1 + 49_152e-6)
    dvp = actors["floor, dvp"]["arms"]["dvp"]["bias2"]
    others = [actors["floor"]["arms"][name]["bias2"] for name in ("none", "tis C=2", "mis")]
    return {
        "T\\*m counted is within 20% of T V e / (1 + V e)": (
            f"{_yes(abs(counted / expected - 1) < 0.2)} ({counted:.3f} of {expected:.3f})"
        ),
        "under the floor DVP biases less than none, TIS and MIS": _yes(dvp < min(others)),
    }


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _star(arms: Found, name: str) -> tuple[float, float, float]:
    """N* and its range over two standard errors of the bias that an estimator removes."""
    plain, own = arms["none"], arms[name]
    error = 2 * math.hypot(plain["bias2_error"], own["bias2_error"])
    ends = [n_star(own, {**plain, "bias2": plain["bias2"] + e}) for e in (0.0, error, -error)]
    return ends[0], ends[1], ends[2]


def _error(arms: Found, name: str, answers: int) -> float:
    """Squared error of a batch's gradient, relative to |gradient|^2."""
    return float(max(arms[name]["bias2"], 0.0) + arms[name]["variance"] / answers)


def _row(actor: str, found: Found, own: Sequence[Found]) -> dict[str, str]:
    arms = found["arms"]
    row = {
        "actor": actor,
        "KL": f"{mean(own, actor, 'kl'):.2g}",
        "ESS": f"{mean(own, actor, 'ess'):.2f}",
        "T\\*m": f"{mean(own, actor, 'floor_tokens'):.2g}",
        "bias of none": _bias(arms["none"]),
        "of tis C=10": _bias(arms["tis C=10"]),
        "of jackpot": _bias(arms["jackpot"]),
        "of mis": _bias(arms["mis"]),
        "of dvp": _bias(arms["dvp"]),
    }
    row["variance of tis C=2, C=10, jackpot / none's"] = ", ".join(
        "{:.2f} ± {:.2f}".format(*arms[name]["variance / none's"])
        for name in ("tis C=2", "tis C=10", "jackpot")
    )
    star, least, most = _star(arms, "tis C=10")
    row["N\\* of tis C=10"] = f"{_count(star)} ({_count(least)} to {_count(most)})"
    row["N\\* of jackpot"] = _count(_star(arms, "jackpot")[0])
    row["AIS's alpha"] = f"{mean(own, actor, 'alpha'):.2f}"
    if actor == "matched":
        row |= {key: "" for key in row if key.startswith("N\\*")}
    return row


def _bias(arm: Found) -> str:
    """Relative to |gradient|; "0" where the squared bias is within two errors of nothing."""
    if arm["bias2"] <= 2 * arm["bias2_error"]:
        return f"< {math.sqrt(max(arm['bias2'], 0.0) + 2 * arm['bias2_error']):.2f}"
    return f"{math.sqrt(arm['bias2']):.2f}"


def _count(star: float) -> str:
    if math.isinf(star):
        return "never"
    return f"{star:.0f}" if star < 1000 else f"{star:.1g}".replace("e+0", "e")


def _kept(actor: str, own: Sequence[Found]) -> dict[str, str]:
    row = {"actor": actor, "tokens": f"{mean(own, actor, 'tokens'):.1f}"}
    row["reward"] = f"{mean(own, actor, 'reward'):.2f}"
    names = [key for key in own[0]["actors"][actor] if key.startswith("kept by ")]
    return row | {name: f"{mean(own, actor, name):.4f}" for name in names}


def draw(file: Any, found: Found) -> None:
    """Squared error of each actor's estimators over the batch, relative to no correction."""
    with panels(file, len(found)) as axes:
        for axis, (actor, own) in zip(axes, found.items()):
            arms = own["arms"]
            batches = [8 * 2**i for i in range(12)]
            axis.axhline(1, color=COLOURS["none"], label="none")
            for name in SHOWN:
                error = [_error(arms, name, n) / _error(arms, "none", n) for n in batches]
                axis.plot(batches, error, label=name, color=COLOURS[name])
            axis.set(
                xscale="log",
                ylim=(0, 1.5),
                xlabel="answers in a batch",
                ylabel="squared error of the gradient / none's",
                title=TITLES[actor],
            )
