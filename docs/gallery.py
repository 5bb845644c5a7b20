"""Draws the curves of docs/experiments.md, of every experiment whose runs are committed under
`benchmarks/results`: the mean over seeds with a band from the least to the greatest."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 230, 44, 170, 12, 28
COLORS = ("#2f6fde", "#0d9268", "#d08a12", "#7c4fe0", "#8b5e34", "#1595b0", "#b0559f", "#6d8a1d")
Curve = list[tuple[float, float]]  # (step, value)


class Shown(NamedTuple):
    """Experiment, its committed runs, what is drawn, and the page with all figures."""

    experiment: str
    file: str
    what: str
    page: str


EVIDENCE = ("staleness", "ais", "draft", "dvp", "jackpot", "rapid", "distillsparse", "trl")
AGENT = "../benchmarks/results/agent_quickstart_cpu.md"
SHOWN = (
    Shown("agent_quickstart", "agent_quickstart_cpu", "held-out accuracy", AGENT),
    Shown("diffusion", "diffusion_cpu", "mean reward", "../benchmarks/results/diffusion_cpu.md"),
    *(
        Shown(
            f"evidence/{name}",
            f"evidence/{name}",
            "held-out accuracy",
            f"../benchmarks/results/evidence/{name}.md",
        )
        for name in EVIDENCE
    ),
)


def curves(lines: list[dict[str, Any]]) -> tuple[str, dict[str, list[Curve]]]:
    """The size that most runs have, and the curves of each arm at that size."""
    sizes = Counter(_size(line) for line in lines if line.get("arm") != "matched")
    size, _ = sizes.most_common(1)[0]
    found: dict[str, list[Curve]] = defaultdict(list)
    for line in lines:
        if _size(line) == size or line.get("arm") == "matched":
            points = line.get("curve") or list(enumerate(line.get("rewards") or (), 1))
            found[_arm(line)].append([(x, y) for x, y in points if y is not None])
    return size, {arm: found[arm] for arm in list(found)[: len(COLORS)]}


def _size(line: dict[str, Any]) -> str:
    return str(line.get("size", line.get("actor", "")))


def _arm(line: dict[str, Any]) -> str:
    return str(line.get("arm") or line.get("correction") or line.get("kind"))


def mean(runs: list[Curve]) -> list[tuple[float, float, float, float]]:
    """(step, mean, least, greatest) by place: asynchronous runs evaluate at steps that differ."""
    length = min(len(run) for run in runs)
    places = [[run[i] for run in runs] for i in range(length)]
    return [
        (
            sum(x for x, _ in at) / len(at),
            sum(y for _, y in at) / len(at),
            min(y for _, y in at),
            max(y for _, y in at),
        )
        for at in places
    ]


def picture(found: dict[str, list[Curve]]) -> str:
    """An SVG of the arms."""
    drawn = {arm: mean(runs) for arm, runs in found.items()}
    last = max(points[-1][0] for points in drawn.values())
    high = max(0.1, *(point[3] for points in drawn.values() for point in points))

    def at(x: float, y: float) -> str:
        across = LEFT + x / last * (WIDTH - LEFT - RIGHT)
        return f"{across:.1f},{TOP + (1 - y / high) * (HEIGHT - TOP - BOTTOM):.1f}"

    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="11" fill="#6b7480">'
        f"{''.join(_axes(last, high, at))}{''.join(_lines(drawn, at))}</svg>\n"
    )


def _axes(last: float, high: float, at: Any) -> Iterator[str]:
    for part in (0.0, 0.5, 1.0):
        x, y = at(0, part * high).split(",")
        yield f'<path d="M{x},{y}H{WIDTH - RIGHT}" stroke="#8886" fill="none"/>'
        yield f'<text x="{LEFT - 6}" y="{float(y) + 4}" text-anchor="end">{part * high:.2g}</text>'
        x = at(part * last, 0).split(",")[0]
        yield f'<text x="{x}" y="{HEIGHT - 8}" text-anchor="middle">{part * last:.0f}</text>'


def _lines(drawn: dict[str, list[tuple[float, float, float, float]]], at: Any) -> Iterator[str]:
    for i, (arm, points) in enumerate(drawn.items()):
        there = [at(x, high) for x, _, _, high in points]
        back = [at(x, low) for x, _, low, _ in reversed(points)]
        line = " ".join(at(x, y) for x, y, _, _ in points)
        color, y = COLORS[i], TOP + 10 + 18 * i
        yield f'<polygon points="{" ".join(there + back)}" fill="{color}" opacity="0.12"/>'
        yield f'<polyline points="{line}" stroke="{color}" fill="none" stroke-width="2"/>'
        yield f'<path d="M{WIDTH - RIGHT + 12},{y - 4}h18" stroke="{color}" stroke-width="2"/>'
        yield f'<text x="{WIDTH - RIGHT + 36}" y="{y}">{escape(arm)}</text>'


def pictures() -> dict[Path, str]:
    """The curves of each experiment, as files."""
    return {DOCS / "images" / _name(shown): picture(curves(_lines_of(shown))[1]) for shown in SHOWN}


def curves_of_all() -> str:
    """The pictures with a line each on what they show: a part of docs/experiments.md."""
    parts = []
    for shown in SHOWN:
        lines = _lines_of(shown)
        size, found = curves(lines)
        seeds = max(len(runs) for runs in found.values())
        sized = f" at size {size}" if "size" in lines[0] else f" of {size} actors" if size else ""
        parts.append(
            f"`{shown.experiment}`: {shown.what} over optimizer steps{sized}, "
            f"up to {seeds} seeds an arm ([all figures]({shown.page})).\n\n"
            f"![{shown.what} over steps, by arm](images/{_name(shown)})\n"
        )
    return "\n".join(parts)


def _lines_of(shown: Shown) -> list[dict[str, Any]]:
    text = (RESULTS / f"{shown.file}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in text]


def _name(shown: Shown) -> str:
    return f"gallery-{shown.experiment.rpartition('/')[2]}.svg"
