"""The agent quickstart on several seeds, and the same game in a single turn.

python -m benchmarks.speed.agents [--seeds 1 2 3] [-- key=value ...]

Every run starts cold, with its warm-up. A finished run is appended to a JSONL file beside the page,
and is not made again: an interrupted benchmark continues. The page is written anew after every run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, median, rlcore, table
from benchmarks.status import run_and_record

PAGE = Path(__file__).resolve().parents[1] / "results" / "agent_quickstart_cpu.md"
GUESSES = 3  # of the experiment
LIMIT_S = 480
NAME = "eval/higher_lower"
# the same problems, samples and steps; every sample is one guess, without an answer to it
KINDS = {
    "several turns": [],
    "one turn": ["environment=none", f"evaluation.samples={GUESSES}", "algorithm.turn_share=0"],
}


def measured(kind: str, seed: int, words: list[str]) -> dict[str, Any]:
    """One run from a cold start."""
    with tempfile.TemporaryDirectory() as cache:
        run = rlcore(
            "train",
            "experiment=agent_quickstart",
            *KINDS[kind],
            f"seed={seed}",
            f"model.warmup.cache_dir={cache}",
            *words,
        )
    key = f"{NAME}/mean@{GUESSES if kind == 'one turn' else 1}"
    found = [row for row in run.rows if key in row]
    best = f"{NAME}/pass@{GUESSES}"
    return {
        "kind": kind,
        "seed": seed,
        "words": words,
        "machine": machine(),
        "seconds": run.seconds,
        "start": found[0][key],
        "end": found[-1][key],
        "greedy start": found[0][f"{NAME}/greedy"],
        "greedy end": found[-1][f"{NAME}/greedy"],
        "best of several at the end": found[-1].get(best),
        "steps": len(run.rows),
        "sampled tokens": sum(row["train/tokens"] for row in run.rows),
        "episodes": sum(row["train/sequences"] for row in run.rows),
        "turns at the end": run.rows[-1].get("reward_parts/turns", 1.0),
        "staleness": max(row["staleness/max"] for row in run.rows),
        "failed scores": run.rows[-1]["ledger/score_errors"],
        "curve": [(row["step"], row[key]) for row in found],
    }


def recorded(page: Path) -> list[dict[str, Any]]:
    """The runs that are finished."""
    lines = page.with_suffix(".jsonl")
    if not lines.exists():
        return []
    return [json.loads(line) for line in lines.read_text().splitlines()]


def record(page: Path, run: dict[str, Any]) -> None:
    """Append a finished run."""
    with page.with_suffix(".jsonl").open("a") as out:
        out.write(json.dumps(run) + "\n")


def wanted(runs: list[dict[str, Any]], seeds: list[int], words: list[str]) -> list[tuple[str, int]]:
    """The runs that are missing: (kind, seed), those of several turns first."""
    made = {(run["kind"], run["seed"]) for run in runs if run["words"] == words}
    return [(kind, seed) for kind in KINDS for seed in seeds if (kind, seed) not in made]


def page_of(runs: list[dict[str, Any]]) -> str:
    """The page in Markdown."""
    several = [run for run in runs if run["kind"] == "several turns"]
    parts = [HEAD.format(machines=" and ".join(sorted({run["machine"] for run in runs})))]
    if several:
        parts += [table([_row(run) for run in several]), _verdict(several), ""]
    parts += ["# One turn against several", "", COMPARED, table(_compared(runs)), ""]
    return "\n".join(parts)


HEAD = """# Agent quickstart

Written by `benchmarks/speed/agents.py`, on {machines}. A hidden number, and an answer `<` or `>`
to every wrong guess. Success is the share of held-out numbers that are found, with sampled guesses
and with greedy ones; seconds are of the whole command with an empty warm-up cache.
"""
COMPARED = f"""The same game with the same number of episodes and optimizer steps, but a single
guess without an answer (`environment=none`). Its best of {GUESSES} is the share of numbers that
{GUESSES} independent guesses find, as many as an episode of several turns has at most. Of ten
numbers, no policy finds more than 1 with a single guess, 3 with three guesses without an answer,
and 7 with three guesses that are answered. Medians over the seeds.
"""


def _row(run: dict[str, Any]) -> dict[str, Any]:
    return {
        "seed": run["seed"],
        "seconds": round(run["seconds"]),
        "sampled, start": run["start"],
        "sampled, end": run["end"],
        "ratio": run["end"] / max(run["start"], 1e-9),
        "greedy, start": run["greedy start"],
        "greedy, end": run["greedy end"],
        "steps": run["steps"],
        "staleness at most": run["staleness"],
        "other settings": " ".join(run["words"]) or "none",
    }


def _verdict(several: list[dict[str, Any]]) -> str:
    quick = [run for run in several if run["seconds"] < LIMIT_S]
    sampled = sum(run["end"] >= 2 * run["start"] for run in quick)
    greedy = sum(run["greedy end"] >= 2 * run["greedy start"] for run in quick)
    return (
        f"\nThe target is at least twice the success at the start in under {LIMIT_S} s. It was met "
        f"by {sampled} of {len(several)} runs with sampled guesses, by {greedy} with greedy ones."
    )


def _compared(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for kind in KINDS:
        own = [run for run in runs if run["kind"] == kind]
        best = [run["best of several at the end"] for run in own]
        if own:
            rows.append(
                {
                    "policy": kind,
                    "seeds": len(own),
                    "success at the start": median(run["start"] for run in own),
                    "success at the end": median(run["end"] for run in own),
                    f"best of {GUESSES} at the end": median(best) if None not in best else "",
                    "sampled episodes": int(median(run["episodes"] for run in own)),
                    "sampled tokens": int(median(run["sampled tokens"] for run in own)),
                    "seconds": round(median(run["seconds"] for run in own)),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("words", nargs="*", help="further overrides")
    args = parser.parse_args()
    for kind, seed in wanted(recorded(args.page), args.seeds, args.words):
        run = measured(kind, seed, args.words)
        record(args.page, run)
        args.page.write_text(page_of(recorded(args.page)))
        shown = {key: run[key] for key in ("kind", "seed", "seconds", "start", "end")}
        print(shown, flush=True)
    print(page_of(recorded(args.page)))


if __name__ == "__main__":
    run_and_record(main, __file__)
