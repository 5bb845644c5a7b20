"""What runs of single kinds of actors forecast for a mixed fleet, against mixed runs.

    python -m benchmarks.evidence.mixes [--seeds 0 1] [--steps 12] [--page]

Each seed has a run of the matched actors alone, one of the INT3 actors alone, and mixed fleets with
a quarter, half and three quarters of new groups for INT3. Figures are sums over a run's steps but
the first. A run is a line of `benchmarks/results/mixes_cpu.jsonl` and is not made again; `--page`
writes `mixes_cpu.md` beside it from the lines.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import machine, rlcore, table
from benchmarks.status import run_and_record
from rlcore.advisor.kinds_advice import kind_rates
from rlcore.config.compose import load
from rlcore.loop.shares import KindRate, worth_of

RESULTS = Path(__file__).resolve().parents[1] / "results"
LINES, PAGE = RESULTS / "mixes_cpu.jsonl", RESULTS / "mixes_cpu.md"
SHARES = (0.25, 0.5, 0.75)  # of new groups, INT3's
# lists of one correction each, so that runs of one kind correct as mixed ones do
COMMON = (
    *("experiment=mixed_fleet", "schedule=on_policy", "schedule.max_staleness=0"),
    "correction=[tis]",
    *("evaluation.every=0", "evaluation.at_start=false", "checkpoint.at_end=false"),
    *("logging=quiet", "logging.report=false"),
)
_OWN = "actor.fp8.correction=null"  # INT3 is corrected as bf16 is
ALONE = {"bf16": ("actor=[bf16]",), "fp8": ("actor=[fp8]", "actor.fp8.share=null", _OWN)}
WITHIN = 0.15

Rates = dict[str, KindRate]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--page", action="store_true", help="run nothing")
    args = parser.parse_args()
    for seed in () if args.page else args.seeds:
        for fleet, words in fleets().items():
            if not any((r["fleet"], r["seed"]) == (fleet, seed) for r in lines()):
                measured = measure(words, seed, args.steps)
                with LINES.open("a") as out:
                    out.write(json.dumps({"fleet": fleet, "seed": seed, **measured}) + "\n")
    PAGE.write_text(page(lines()))


def fleets() -> dict[str, tuple[str, ...]]:
    """The words of each fleet, by its name."""
    mixed = {f"{s:g}": (f"actor.fp8.share={s:g}", _OWN) for s in SHARES}
    return {**ALONE, **mixed}


def lines() -> list[dict[str, Any]]:
    return [json.loads(row) for row in LINES.read_text().splitlines()] if LINES.exists() else []


def measure(words: Sequence[str], seed: int, steps: int) -> dict[str, Any]:
    """The rates of the kinds of a run, and how busy the machine was around it."""
    given = [*COMMON, *words, f"schedule.steps={steps}", f"seed={seed}"]
    with tempfile.TemporaryDirectory(prefix="rlcore-mixes-") as folder:
        before = os.getloadavg()[0]
        found = rlcore("train", *given, run_dir=Path(folder) / "run", every_s=10)
        kinds = kind_rates(found.rows[1:], load([*given, "run_dir=unused"]).actor)["actor_s"]
    return {
        "kinds": {label: kind._asdict() for label, kind in kinds.items()},
        "steps": steps,
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "machine": machine(),
    }


def page(found: Sequence[Mapping[str, Any]]) -> str:
    """The tables: what each way of forecasting says of each mixed run, and each kind's figures."""
    by_name = {(r["fleet"], r["seed"]): read_kinds(r) for r in found}
    rows, errors = [], defaultdict(list)
    for (fleet, seed), kinds in by_name.items():
        if fleet in ALONE or not all((kind, seed) in by_name for kind in ALONE):
            continue
        sources = {"runs of one kind": {kind: by_name[kind, seed][kind] for kind in ALONE}}
        if fleet != "0.5" and ("0.5", seed) in by_name:
            sources["the half-half run"] = by_name["0.5", seed]
        for name, source in sources.items():
            row: dict[str, Any] = {"INT3's share": fleet, "seed": seed, "forecast from": name}
            for unit, worth in (("tokens/s", absolute), ("of bf16's pace", relative)):
                measured, said = worth(kinds, float(fleet)), worth(source, float(fleet))
                off = said / measured - 1
                errors[name, unit].append(off)
                row |= {f"measured, {unit}": f"{measured:.4g}"}
                row |= {f"forecast, {unit}": f"{said:.4g} ({off:+.0%})"}
            rows.append(row)
    told = [f"- from {n}, in {unit}: {sentence(off)}" for (n, unit), off in errors.items()]
    parts = [HEAD, table(rows), "\n".join(told), NOTES, table(of_kinds(found)), origin(found)]
    return "\n\n".join(parts) + "\n"


def absolute(kinds: Rates, share: float) -> float:
    """Effective tokens for each actor-second of a fleet with this share of INT3."""
    return worth_of(kinds, {"bf16": 1 - share, "fp8": share})


def relative(kinds: Rates, share: float) -> float:
    """Effective tokens for each token that an actor-second of the matched kind gives: the speed of
    the machine cancels, on which the advised shares do not depend either."""
    return absolute(kinds, share) / kinds["bf16"].tokens


def read_kinds(line: Mapping[str, Any]) -> Rates:
    return {label: KindRate(**kind) for label, kind in line["kinds"].items()}


def sentence(off: Sequence[float]) -> str:
    """Example: "5 of 6 forecasts are within 15%, the mean error is +3%, the largest 17%." """
    near = sum(abs(error) <= WITHIN for error in off)
    return (
        f"{near} of {len(off)} forecasts are within {WITHIN:.0%} of the run, the mean error is "
        f"{np.mean(off):+.0%}, the largest {max(map(abs, off)):.0%}."
    )


def of_kinds(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The pace and the worth of each kind in each run."""
    return [
        {
            "fleet": line["fleet"],
            "seed": line["seed"],
            "kind": label,
            "tokens an actor-second": f"{kind.tokens:.0f}",
            "effective share": f"{kind.effective:.3f}",
            "below 0.86": f"{kind.below:.3f}",
            "tokens an answer": f"{kind.length:.1f}",
        }
        for line in found
        for label, kind in read_kinds(line).items()
    ]


HEAD = """# Forecast and measured worth of mixed fleets

`benchmarks/evidence/mixes.py`: effective tokens for each second in the engines' steps of mixed
fleets (bf16 and INT3, `experiment=mixed_fleet`, on policy), and what the model behind
`rlcore plan kinds=` and `rlcore doctor` forecasts for the same shares from a run of each kind
alone, or from the fleet of half and half: in tokens a second, and over the matched kind's pace in
the same run, in which the speed of the machine cancels. The advised shares depend on the latter
alone."""

NOTES = """Seconds of engines' steps are by the clock, so that a forecast in tokens a second also
needs a machine that is as busy as in the measured runs. Two things remain beside it: the
effective share of a few hundred answers varies from run to run, and an engine is slower for each
token the fewer requests it has, so that a kind with a small share of groups falls behind its pace
alone. The model knows one pace of a kind, whatever its load."""


def origin(found: Sequence[Mapping[str, Any]]) -> str:
    loads = [load for line in found for load in line["load"]]
    where = "; ".join(sorted({line["machine"] for line in found}))
    return (
        f"{len(found)} runs on {where}; load averages around the runs from {min(loads):g} to "
        f"{max(loads):g}, so that other programs had a part of both cores."
    )


if __name__ == "__main__":
    run_and_record(main, __file__)
