"""Back test of the rules of `logging.warnings`: when they speak in runs that are lost, in runs that
are harmed, and in runs that end well.

    python -m benchmarks.evidence.alarms [--minutes 30] [--only-page] [--start FOLDER]

A run is 40 steps of the learner alone (`late_learner.py`), without a bound on its steps, on samples
of an exact age: a grid of ages, rates and seeds with tis, and other corrections at age 4. Each is
one line of `results/alarms_cpu.jsonl` with its rows, and is not run again. Runs on a GPU come from
`tests/data/recorded_runs.jsonl`. The page judges all of them by the rules as they are.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.evidence.late_learner import (
    ALPHABET,
    END,
    GROUPS,
    IDS,
    MOST,
    SAMPLES,
    batch,
    held_out,
    late_steps,
    learner,
    problems,
)
from benchmarks.harness import machine, table
from rlcore.learner.sequences import TokenSequence
from rlcore.learner.specs import LearnerSpec
from rlcore.loop.collapse import SIGNS
from rlcore.metrics.health import RULES as JUDGES
from rlcore.metrics.health import Health
from rlcore.metrics.rules.base import Course
from rlcore.metrics.specs import WarningsSpec
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.types import Group

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "benchmarks" / "results" / "alarms_cpu.jsonl"
PAGE = FILE.with_suffix(".md")
RECORDED = ROOT / "tests" / "data" / "recorded_runs.jsonl"
STEPS, SEEDS = 40, (0, 1, 2)
AGES, RATES = (0, 1, 2, 4, 8), (5e-5, 1e-4, 2e-4, 4e-4)
SHAPE = FreshModelSpec(hidden_size=96, heads=4, layers=2, intermediate_size=256, vocab_size=64)
OTHERS = (("none",), ("mis",), ("tis", "vcpo"), ("dppo",))  # corrections at age 4
#: column of a line's rows -> metric
NAMES = (
    *("reward/mean", "mismatch/kl_k3", "mismatch/ess", "step_bound/answer_kl"),
    *("response_length/mean", "entropy", "grad_norm", "staleness/mean", "lr"),
)
LOST, HARM, FIRST = 0.7, 0.05, 3  # share of the first rewards; below the best; steps
Rows = Sequence[dict[str, Any]]
Line = Mapping[str, Any]
Rule = Callable[[Rows], int | None]


@dataclass(frozen=True)
class Cell:
    corrections: tuple[str, ...]
    age: int
    lr: float
    seed: int


def cells() -> Iterator[Cell]:
    """Every run, those on policy first."""
    for seed in SEEDS:
        for age in AGES:
            yield from (Cell(("tis",), age, lr, seed) for lr in RATES)
    for names in OTHERS:
        yield from (Cell(names, 4, lr, 0) for lr in RATES)


def run(cell: Cell, start: Path) -> dict[str, Any]:
    """Run a cell. `final`: held-out reward; `rows`: by step, columns NAMES."""
    names = [name for name in cell.corrections if name != "none"]
    dppo = ObjectiveSpec(advantage="grpo", loss="reinforce")
    rank = learner(
        start,
        LearnerSpec(lr=cell.lr, lr_warmup_steps=3, betas=(0.9, 0.95), step_bound=None),
        STEPS,
        cell.seed,
        lag=cell.age,
        corrections={name: {} for name in names},
        objective=dppo if "dppo" in names else None,
    )
    lm: Any = rank.engine.policy.lm

    def sampled(number: int, version: int) -> list[Group]:
        return batch(lm, cell.seed, number, version)

    rows = []
    for step, reward, row in late_steps(rank, STEPS, cell.age, 1, sampled):
        tokens = row["mismatch/tokens"] / (GROUPS * SAMPLES)
        own = {"reward/mean": reward, "response_length/mean": tokens}
        found = row | own | {"staleness/mean": float(min(step - 1, cell.age))}
        rows.append([float(f"{found[name]:.4g}") for name in NAMES])
    final = held_out(lm)
    return {**asdict(cell), "final": final, "machine": machine(), "rows": rows}


def make_start(folder: Path, least: float = 0.6) -> None:
    """A small model after supervised steps until its held-out reward is `least`."""
    fresh = folder.with_name(folder.name + "-fresh")
    build_fresh_model(fresh, ALPHABET, SHAPE, seed=3, max_len=2 * MOST + 16)
    rank = learner(fresh, LearnerSpec(lr=1e-3, lr_warmup_steps=20, betas=(0.9, 0.95)), 400, 5)
    lm: Any = rank.engine.policy.lm
    step = 0
    while step % 20 or held_out(lm) < least:
        asked = problems(5, "start", step, GROUPS * SAMPLES)
        answers = ([*(IDS[c] for c in p.answer), END] for p in asked)
        shown = [TokenSequence.of_answer(p.prompt, ids) for p, ids in zip(asked, answers)]
        rank.sft_step(step, shown)
        step += 1
    lm.save_pretrained(folder)


def rows_of(line: Line) -> Rows:
    return [
        {"step": step, **dict(zip(NAMES, row)), "staleness/max": row[NAMES.index("staleness/mean")]}
        for step, row in enumerate(line["rows"], start=1)
    ]


def recorded() -> dict[str, Rows]:
    """Runs on a GPU with late samples, by name."""
    found: dict[str, Rows] = {}
    for run in map(json.loads, RECORDED.read_text().splitlines()):
        rows = [
            {"step": step, "lr": run["lr"], **dict(zip(run["names"], values))}
            for step, values in enumerate(run["rows"], start=1)
        ]
        if not run["run"].startswith("cpu") and max(r["staleness/mean"] for r in rows):
            found[run["run"]] = rows
    return found


def spoken(rows: Rows) -> dict[str, int]:
    """The first step at which each rule of the policy speaks; "collapse": both signs of one at
    once."""
    health = Health(WarningsSpec(), Course(staleness_bound=int(max(_ages(rows)))))
    found: dict[str, int] = {}
    for row in rows:
        health.add(row)
        said = {name for name in health.speaking if not JUDGES[name].of_speed}
        for name in said | ({"collapse"} if said >= SIGNS else set()):
            found.setdefault(name, int(row["step"]))
    return found


def _ages(rows: Rows) -> list[float]:
    return [row["staleness/mean"] for row in rows]


def fallen_at(rows: Rows) -> int | None:
    """The first step whose rewards, with the two before, are below LOST of the first ones'."""
    rewards = [row["reward/mean"] for row in rows]
    least = LOST * fmean(rewards[:FIRST])
    for end in range(FIRST, len(rewards) + 1):
        if fmean(rewards[end - FIRST : end]) < least:
            return end
    return None


def first(rows: Rows, count: int, holds: Callable[[Rows], bool]) -> int | None:
    """The first step at whose end `holds` is true of the last `count` rows."""
    ends = (n for n in range(1, len(rows) + 1) if holds(rows[max(0, n - count) : n]))
    return next(ends, None)


def _far(rows: Rows) -> bool:
    nats = [row["mismatch/kl_k3"] * row["response_length/mean"] for row in rows]
    return sum(value > 2 for value in nats) >= 2


def _few(rows: Rows) -> bool:
    return len(rows) == 20 and fmean(row["mismatch/ess"] for row in rows) < 0.5


def _says(name: str) -> Rule:
    return lambda rows: spoken(rows).get(name)


#: rule -> the step at which it speaks in a run
RULES: dict[str, Rule] = {
    "before: mean ESS of 20 steps below 0.5": lambda rows: first(rows, 20, _few),
    "prototype: k3 times tokens above 2 in 2 of 3": lambda rows: first(rows, 3, _far),
    "answer_kl": _says("answer_kl"),
    "ess": _says("ess"),
    "fallen": _says("fallen"),
    "any of today's": lambda rows: min(spoken(rows).values(), default=None),
    "answer_kl and fallen at once (`schedule.on_collapse`)": _says("collapse"),
}


def judged(name: str, lost: Sequence[Rows], harmed: Sequence[Rows], well: Sequence[Rows]) -> Line:
    """A rule's row of the table."""
    rule = RULES[name]
    ahead, late = [], 0
    for rows in lost:
        at, fell = rule(rows), fallen_at(rows)
        assert fell is not None
        if at is not None and at <= fell:
            ahead.append(fell - at)
        late += at is not None and at > fell
    never = len(lost) - len(ahead) - late
    return {
        "rule": name,
        f"lost ({len(lost)}): by then, later, never": f"{len(ahead)}, {late}, {never}",
        "steps ahead, median": median(ahead) if ahead else "",
        f"harmed, not lost ({len(harmed)})": sum(rule(rows) is not None for rows in harmed),
        f"ended well ({len(well)})": sum(rule(rows) is not None for rows in well),
    }


def sorted_by_end(lines: Sequence[Line]) -> tuple[list[Rows], list[Rows], list[Rows]]:
    """Late runs that were lost, harmed and ended well. Harmed: they end HARM below the best rate on
    policy, by its mean over the seeds."""
    by_rate: dict[float, list[float]] = {}
    for line in lines:
        if not line["age"]:
            by_rate.setdefault(line["lr"], []).append(line["final"])
    best = max(map(fmean, by_rate.values()))
    found: tuple[list[Rows], list[Rows], list[Rows]] = ([], [], [])
    for line in lines:
        if line["age"]:
            rows = rows_of(line)
            harmed = line["final"] < best - HARM
            found[0 if fallen_at(rows) else 1 if harmed else 2].append(rows)
    return found


def page(lines: Sequence[Line]) -> str:
    ends = sorted_by_end(lines)
    on = [rows_of(line) for line in lines if not line["age"]]
    quiet = sum(not spoken(rows) for rows in on)
    gpu: list[dict[str, Any]] = []
    for name, rows in recorded().items():
        told = spoken(rows)
        gpu.append({"run": name, "rewards fell at step": fallen_at(rows) or "never"})
        gpu[-1] |= {n: told.get(n, "") for n in ("answer_kl", "ess", "fallen", "collapse")}
    return "\n\n".join(
        [
            "# Back test of the warnings",
            "`python -m benchmarks.evidence.alarms` runs what is missing and writes this page: "
            f"{len(lines)} of {len(list(cells()))} runs of {STEPS} steps without a step bound, of "
            "the learner alone on samples of an exact age (a model of 0.3 million parameters sorts "
            "8 to 16 digits). Lost: rewards of three steps below 0.7 of the first three. Harmed: "
            f"the held-out reward ends {HARM} below the best rate on policy. Rules of "
            "[logging.warnings](../../docs/monitoring.md#warnings) judge each row as it comes.",
            table([judged(name, *ends) for name in RULES]),
            f"On policy no rule spoke in {quiet} of {len(on)} runs, at rates up to {RATES[-1]:g}.",
            "First steps at which rules speak in the recorded runs on an H100 with late samples:",
            table(gpu),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30, help="start no run after these")
    parser.add_argument("--only-page", action="store_true", help="run nothing, write the page")
    parser.add_argument("--start", type=Path, default=ROOT / "cache" / "alarms-start")
    args = parser.parse_args()
    stop = time.monotonic() + 60 * args.minutes
    torch.set_num_threads(1)
    if not args.start.exists():
        make_start(args.start)
    lines = [json.loads(row) for row in FILE.read_text().splitlines()] if FILE.exists() else []
    done = {(tuple(r["corrections"]), r["age"], r["lr"], r["seed"]) for r in lines}
    for cell in cells():
        if args.only_page or time.monotonic() > stop:
            break
        if (cell.corrections, cell.age, cell.lr, cell.seed) not in done:
            lines.append(run(cell, args.start))
            with FILE.open("a") as out:
                out.write(json.dumps(lines[-1]) + "\n")
            print(cell, round(lines[-1]["final"], 3), flush=True)
    PAGE.write_text(page(lines) + "\n")


if __name__ == "__main__":
    main()
