"""How a step's time and memory grow, one size at a time, with the exponents.

    python -m benchmarks.speed.growth [--parts learner,ranks,publication,fleet] [--out FILE.md]
        [--figure FILE.svg]

`learner`: forward and backward of a step with the learner's own micro-batches and head pass, on one
thread; each row of sizes changes one of them. `ranks`: a whole optimizer step of so many DeepSpeed
ranks on one batch. `publication`: one set of weights to the actors of a node. `fleet`: controller,
buffer, admission and assignment of `rlcore plan` with more and more actors, each of which has as
much work; simulated time is free, so that what is measured is the control plane and its fakes.

Seconds are of processor time, the shortest of several rounds. The exponent is that of the last
doubling: where a part that does not grow is small by then.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import again, machine, table
from benchmarks.speed import growth_parts

BASE: dict[str, Any] = {
    "groups": 8,
    "samples": 8,
    "response": 128,
    "prompt": 64,
    "vocabulary": 4096,
    "layers": 4,
    "width": 128,
    "turns": 1,
    "rewritten": False,
}
TURN = {"samples": 4, "response": 64}  # of an episode of several turns


@dataclass(frozen=True, slots=True)
class Series:
    """One size that grows.

    Example: Series("learner", "groups", (4, 8), lambda n: ("learner_step", BASE | {"groups": n}))
    """

    part: str
    name: str
    values: tuple[int, ...]
    call: Callable[[int], tuple[str, tuple[Any, ...]]]  # a function of growth_parts, its arguments


def _learner(name: str, *values: int, **others: Any) -> Series:
    key = name.split(",")[0]
    return Series(
        "learner", name, values, lambda n: ("learner_step", (BASE | others | {key: n}, 2))
    )


SERIES = (
    _learner("groups", 4, 8, 16, 32),
    _learner("samples", 2, 4, 8, 16),
    _learner("response", 64, 128, 256, 512),
    _learner("prompt", 64, 128, 256, 512),
    _learner("turns, one record", 1, 2, 4, 8, **TURN),
    _learner("turns, a record each", 1, 2, 4, 8, **TURN, rewritten=True),
    _learner("vocabulary", 4096, 16384, 65536, 131072),
    _learner("layers", 2, 4, 8, 16),
    _learner("width", 64, 128, 256, 512),
    Series("ranks", "ranks", (1, 2, 4), lambda n: ("ranks_step", (n, BASE))),
    Series(
        "publication",
        "million parameters",
        (4, 16, 64, 256),
        lambda n: ("publication", (n << 20, 1)),
    ),
    Series("publication", "actors", (1, 2, 4, 8), lambda n: ("publication", (64 << 20, n))),
    Series("fleet", "actors of a fleet", (1, 4, 16, 64, 256), lambda n: ("fleet_step", (n,))),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="learner,ranks,publication,fleet")
    parser.add_argument("--out", type=Path, help="the tables")
    parser.add_argument("--figure", type=Path, help="seconds against each size, as SVG")
    parser.add_argument("--one", help="a function and its arguments as JSON: call it in here")
    args = parser.parse_args()
    if args.one is not None:
        function, arguments = json.loads(args.one)
        print(json.dumps(getattr(growth_parts, function)(*arguments)))
        return
    chosen = [s for s in SERIES if s.part in args.parts.split(",")]
    found = {s.name: [in_own_process(*s.call(v)) for v in s.values] for s in chosen}
    rows = [row(s, found[s.name]) for s in chosen]
    text = f"{machine()}\n\n{table(rows)}\n"
    print(text)
    if args.out is not None:
        args.out.write_text(text)
    if args.figure is not None:
        draw(args.figure, chosen, found)


def in_own_process(function: str, arguments: Sequence[Any]) -> tuple[float, float]:
    """(seconds, MiB): what is loaded for one size does not count for the next."""
    command = [*again(__spec__), "--one", json.dumps([function, arguments])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=3600)
    seconds, mib = json.loads(done.stdout.splitlines()[-1])
    print(function, arguments, f"{seconds:.3g} s, {mib:.0f} MiB", flush=True)
    return float(seconds), float(mib)


def row(series: Series, found: Sequence[tuple[float, float]]) -> dict[str, str]:
    """A line of the table: seconds and MiB at each value, and the last exponents."""
    seconds, memory = zip(*found)
    return {
        "size": series.name,
        "values": ", ".join(f"{v:g}" for v in series.values),
        "CPU s": ", ".join(f"{s:.3g}" for s in seconds),
        "exponent": exponent(series.values, seconds),
        "MiB": ", ".join(f"{m:.0f}" for m in memory),
        "exponent ": exponent(series.values, memory),
    }


def exponent(sizes: Sequence[float], found: Sequence[float]) -> str:
    """By the last two values."""
    grows = math.log(max(found[-1], 1e-9) / max(found[-2], 1e-9))
    return f"{grows / math.log(sizes[-1] / sizes[-2]):.2f}"


def draw(file: Path, chosen: Sequence[Series], found: dict[str, list[tuple[float, float]]]) -> None:
    """Seconds over each size, both over those of its first value and on logarithmic axes, a panel a
    part; dashed: in proportion."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "rlcore", "font.size": 8, "svg.fonttype": "none"})
    from matplotlib import pyplot

    parts = list(dict.fromkeys(s.part for s in chosen))
    figure, axes = pyplot.subplots(
        1, len(parts), figsize=(4 * len(parts), 5), layout="constrained", squeeze=False
    )
    for axis, part in zip(axes[0], parts):
        own = [s for s in chosen if s.part == part]
        for series in own:
            seconds = [s for s, _ in found[series.name]]
            times = [v / series.values[0] for v in series.values]
            last = exponent(series.values, seconds)
            label = f"{series.name} ({last})"
            axis.plot(times, [s / seconds[0] for s in seconds], marker="o", label=label)
        most = max(s.values[-1] / s.values[0] for s in own)
        axis.plot([1, most], [1, most], color="grey", linestyle="--", linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="times the first size", title=part)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
    axes[0][0].set_ylabel("times the first one's processor time")
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
