"""Writes the page of `estimator_lab.py`: its tables and its figure, from its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.evidence.evidence_page import COLOURS, PAGES, panels, replace_block
from benchmarks.harness import table

Found = Mapping[str, Any]
PAGE = PAGES / "estimator-lab.md"
SHOWN = {"tis C=10": "tis", "ais": "ais", "jackpot, drawn": "jackpot, drawn"}
MIXED = 0.3  # deviation of mixed errors, and of the fixed one that they are compared with
PANELS = (("fixed", 0.3, 8), ("fixed", 0.3, 64), ("fresh", 0.3, 8))


def n_star(arm: Mapping[str, float], plain: Mapping[str, float]) -> float:
    """Answers above which an arm's mean squared error is below that of no correction."""
    gain = plain["bias2"] - arm["bias2"]
    extra = arm["variance"] - plain["variance"]
    if gain <= 0:
        return math.inf if extra >= 0 else 0.0
    return max(extra / gain, 0.0)


def write_page(found: Found) -> None:
    replace_block(PAGE, block(found))
    draw(PAGES / "estimator-lab.svg", found)


def block(found: Found) -> str:
    """Figure, verdicts on the four hypotheses, and tables."""
    verdicts = [f"- {name}: {said}" for name, said in hypotheses(found).items()]
    return "\n\n".join(
        [
            "![Error of the gradient over the batch, and success under a floor](estimator-lab.svg)",
            "\n".join(verdicts),
            seen(found),
            table([_cell(cell) for cell in found["cells"]]),
            *shares(found),
            table([_floor(row) for row in found["floors"]]),
            *(needle(found["needle"]) if "needle" in found else []),
            f"{found['answers']} answers a variance, 8 worlds (fixed, draft, mixed: 16), float64.",
        ]
    )


def hypotheses(found: Found) -> dict[str, str]:
    """The four statements that were registered before, and what came out."""
    worst = max(row["difference"] for row in found["identity"])
    arms = [cell["arms"] for cell in found["cells"]]
    rejection = [a["jackpot, drawn"]["variance"] / a["jackpot"]["variance"] for a in arms]
    by_length = {
        length: [_star(c) for c in _fixed(found, length)]
        for length in sorted({c["length"] for c in found["cells"]})
    }
    spread = "; ".join(
        f"{min(stars):.0f} to {max(stars):.0f} answers of {length} tokens "
        f"(factor {max(stars) / min(stars):.1f})"
        for length, stars in by_length.items()
    )
    fresh = [_bias(c) / _bias(_same_size(found, c)) for c in found["cells"] if c["kind"] == "fresh"]
    return {
        "averaged Jackpot is min(Z rho, C1) to 1e-12": f"largest difference {worst:.1e}",
        "averaging the draws never adds variance": (
            f"drawing has {min(rejection):.3f} to {max(rejection):.3f} times the variance"
        ),
        "N\\* of TIS (C = 10) differs by less than a factor of 2 over sizes of rounding": spread,
        "at equal KL, fresh noise biases less than a fifth of a fixed error": (
            f"{min(fresh):.1%} to {max(fresh):.1%}"
        ),
    }


def seen(found: Found) -> str:
    """N* by products between answers, of each world's own sample, against the true one."""
    said = []
    for length in sorted({c["length"] for c in found["cells"]}):
        own = [c for c in found["cells"] if c["kind"] in ("fixed", "mixed")]
        times = [_seen(c) / _star(c) for c in own if c["length"] == length]
        said.append(f"{min(times):.1f} to {max(times):.1f} times at {length} tokens")
    return (
        f"N\\* by products between {found['answers']} answers "
        "(`functional.batch_worth_correcting`), median over worlds, over that of the table, for "
        "fixed and mixed errors: "
        f"{'; '.join(said)}."
    )


def _seen(cell: Found) -> float:
    """Median over worlds; a world that shows no bias has none."""
    return float(np.median([math.inf if n is None else n for n in cell["n_star_seen"]]))


def _by_size(cell: Found, answers: int) -> float:
    """N/(N + N*), mean over worlds with the N* that each shows."""
    stars = [math.inf if n is None else n for n in cell["n_star_seen"]]
    return float(np.mean([answers / (answers + star) for star in stars]))


#: How much of C = 5's correction each takes, of a cell and of N answers.
SHARES: Mapping[str, Callable[[Found, int], float]] = {
    "none": lambda cell, answers: 0.0,
    "whole": lambda cell, answers: 1.0,
    "AIS's signals": lambda cell, answers: float(cell["alpha"]),
    "N/(N + N\\*)": _by_size,
}


def excess(cell: Found, share: float, answers: int) -> float:
    """Mean squared error of the gradient at a share of correction, over the least of any share."""
    x = np.linspace(0.0, 1.0, 201)
    parts = cell["mixed_error"]
    a, b, c = (bias + vary / answers for bias, vary in zip(parts["bias"], parts["variance"]))

    def error(x: Any) -> Any:
        return (1 - x) ** 2 * a + x**2 * b + 2 * x * (1 - x) * c

    return float(error(share) / min(error(x).min(), error(share)))


def shares(found: Found) -> list[str]:
    """How far each share of correction is from the best one, mean and largest over cells."""
    stale = [c for c in found["cells"] if c["kind"] == "stale"]
    others = [c for c in found["cells"] if c["kind"] != "stale"]
    rows = []
    for said, cells in (("all but stale", others), ("stale", stale)):
        for answers in (16, 128, 1024):
            row = {"mismatch": said, "answers": str(answers)}
            for name, share in SHARES.items():
                own = [excess(c, share(c, answers), answers) - 1 for c in cells]
                row[name] = f"{np.mean(own):.0%}, {max(own):.0%}"
            rows.append(row)
    return [
        "**How much to correct.** Squared error of the gradient above that of the best share of "
        "correction (C = 5), mean and largest over the mismatches of the table:",
        table(rows),
    ]


def _star(cell: Found) -> float:
    return n_star(cell["arms"]["tis C=10"], cell["arms"]["none"])


def _fixed(found: Found, length: int) -> list[Found]:
    return [c for c in found["cells"] if c["kind"] == "fixed" and c["length"] == length]


def _same_size(found: Found, cell: Found) -> Found:
    """The fixed error of a size has the KL of fresh noise of that size."""
    return next(c for c in _fixed(found, cell["length"]) if c["size"] == cell["size"])


def _bias(cell: Found) -> float:
    return math.sqrt(cell["arms"]["none"]["bias2"])


def _cell(cell: Found) -> dict[str, str]:
    arms, plain = cell["arms"], cell["arms"]["none"]
    stars = {name: _answers(n_star(arms[name], plain)) for name in ("tis C=10", "jackpot", "ais")}
    mixing = " ".join(f"{share:.2f}" for share in cell["mixing"][:3])
    return {
        "mismatch": f"{cell['kind']} {cell['size']:g}, T = {cell['length']}",
        "KL": f"{cell['kl']:.2g}",
        "ESS": f"{cell['ess']:.2f}",
        "acceptance": f"{cell['acceptance']:.2f}",
        "fixed share": f"{cell['fixed_share']:.2f}",
        "bias of none": f"{_bias(cell):.3f}",
        "of tis": f"{math.sqrt(arms['tis C=10']['bias2']):.3f}",
        "cosine of tis, mis": f"{arms['tis C=10']['cosine']:.2f}, {arms['mis']['cosine']:.2f}",
        "N\\* of tis": stars["tis C=10"],
        "of jackpot, averaged": stars["jackpot"],
        "drawn": _answers(n_star(arms["jackpot, drawn"], plain)),
        "best share of correction at 16, 128, 1024": mixing,
        "AIS's alpha": f"{cell['alpha']:.2f}",
    }


def _answers(star: float) -> str:
    if math.isinf(star):
        return "never"
    return f"{star:.0f}" if star < 1000 else f"{star:.1g}".replace("e+0", "e")


def _floor(row: Found) -> dict[str, str]:
    return {
        "floor e": f"{row['floor']:.1e}",
        "T\\*m": f"{row['expected']:.2f}",
        "counted by floor_tokens": f"{row['counted']:.2f}",
    } | {arm: f"{np.mean(finals):.3f}" for arm, finals in row["success"].items()}


def needle(rows: Sequence[Found]) -> list[str]:
    """Verdicts on the bandit's two statements, and its table."""
    matched, errors = rows[0]["matched"], rows[1:]
    bonus = [row["more"]["none"] for row in errors if row["kind"] == "fresh"]
    kept = [row["more"]["ais"] for row in errors if row["kind"] == "fresh"]
    said = {
        "fresh noise explores: without correction the needle is found at least 0.05 more often "
        "than by a matched actor": bonus,
        "AIS keeps that: it finds the needle at least 0.05 more often than TIS": kept,
    }
    lines = [
        f"- {name}: {judged(values)} ({', '.join(_pair(*v) for v in values)})"
        for name, values in said.items()
    ]
    shown = [
        {
            "error of the actor": f"{row['kind']} {row['size']:g}",
            "matched": f"{matched:.3f}",
            **{arm: f"{share:.3f}" for arm, share in row["found"].items()},
            "none above matched": _pair(*row["more"]["none"]),
            "tis above matched": _pair(*row["more"]["tis C=5"]),
            "ais above tis": _pair(*row["more"]["ais"]),
            "ais above none": _pair(*row["more"]["ais above none"]),
        }
        for row in errors
    ]
    return [
        "**The needle.** Share of 1,000 runs that end on the best action:",
        "\n".join(lines),
        table(shown),
    ]


def judged(values: Sequence[Sequence[float]], least: float = 0.05) -> str:
    """supported, refuted or open: mean and half of the interval of each size of noise."""
    if all(mean >= least and mean > half for mean, half in values):
        return "supported"
    return "refuted" if all(mean + half < least for mean, half in values) else "open"


def _pair(mean: float, half: float) -> str:
    return f"{mean:+.3f} ± {half:.3f}"


def draw(file: Path, found: Found) -> None:
    """Error of the gradient over the size of the batch in three cells, and success under floors."""
    with panels(file, 4) as axes:
        for axis, (kind, size, length) in zip(axes, PANELS):
            cell = next(
                c
                for c in found["cells"]
                if (c["kind"], c["size"], c["length"]) == (kind, size, length)
            )
            _errors(axis, cell)
        for arm in ("none", "tis", "mis", "dvp"):
            means = [np.mean(row["success"][arm]) for row in found["floors"]]
            places = [row["expected"] for row in found["floors"]]
            axes[3].plot(places, means, marker="o", label=arm, color=COLOURS[arm])
        axes[3].set(
            xlabel="T*m: floor tokens an answer",
            ylabel="success",
            ylim=(0, 1),
            title="floor, T = 64",
        )


def _errors(axis: Any, cell: Found) -> None:
    batches: Sequence[int] = [4 * 2**i for i in range(12)]
    axis.axhline(1, color=COLOURS["none"], label="none")
    for name, label in SHOWN.items():
        error = [_error(cell, name, n) / _error(cell, "none", n) for n in batches]
        axis.plot(batches, error, label=label, color=COLOURS[label])
    said = {"fixed": "rounding", "fresh": "fresh noise"}[cell["kind"]]
    axis.set(
        xscale="log",
        ylim=(0.2, 1.2),
        xlabel="answers in a batch",
        ylabel="squared error of the gradient / none's",
        title=f"{said}, KL {cell['kl']:.2g}, T = {cell['length']}",
    )


def _error(cell: Found, arm: str, answers: int) -> float:
    return float(cell["arms"][arm]["bias2"] + cell["arms"][arm]["variance"] / answers)
