"""Tests a paper's claim at small scale, over seeds: runs what is missing, writes table and figure.

    python benchmarks/evidence.py NAME [--minutes 60] [--seeds 0,1] [--only-page]

NAME is a study of `evidence_studies.py`. Each finished run is one line of
`benchmarks/results/evidence/NAME.jsonl`; a run that has a line is not run again, so the command can
be stopped and continued. Two commands may run side by side, each with seeds of its own (`taskset`
gives each a core); the one whose part of the sweep ends first ends, and is started again once the
sweep is whole. Order of the runs:

1. The sweep: the uncorrected arm at each size of the mismatch, and the matched arm, every seed.
2. The choice, written to the same file once: the smallest size at which the uncorrected arm ends
   at least ten points of held-out accuracy below the matched one (mean over seeds, paired) or
   collapses in most seeds. If there is none, the study ends here and the page says so.
3. Every method at that size, with the paper's own settings; then the further arms.

A study without an uncorrected arm has no sweep: seed after seed, all its arms run at all its sizes.

The page `docs/evidence/NAME.md` keeps its text; the block between its two markers, and the figure,
are made from the lines. The policy is evaluated on a plain engine with its own weights, never on
the degraded actor.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evidence_page import write_page
from evidence_studies import STUDIES, Study, Words
from evidence_tables import Line, choose, collapse_step, source_digest
from evidence_trl import run_trl
from harness import machine, rlcore

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "evidence"
QUIET = ("logging=quiet", "checkpoint.at_end=false")
UNCORRECTED = "uncorrected"
MATCHED = "matched"


@dataclass(frozen=True)
class Job:
    """One run: an arm at a size, with a seed."""

    arm: str
    size: str
    seed: int
    words: Words


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=list(STUDIES))
    parser.add_argument("--minutes", type=float, default=120, help="start no run after these")
    parser.add_argument("--seeds", type=_numbers, help="run these only, as 0,1")
    parser.add_argument("--only-page", action="store_true", help="run nothing, write the page")
    args = parser.parse_args()
    study, file = STUDIES[args.name], RESULTS / f"{args.name}.jsonl"
    own = study if args.seeds is None else replace(study, seeds=args.seeds)
    stop = time.monotonic() + 60 * args.minutes
    while not args.only_page and time.monotonic() < stop:
        job = next(missing(own, lines(file)), None)
        if job is None:
            break
        append(file, run(study, job))
        settle(study, file)
    write_page(args.name, study, lines(file), source_digest(ROOT, study.sources))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def lines(file: Path) -> list[Line]:
    """The finished runs of a file, and its choice of a size if that has been made."""
    return [json.loads(row) for row in file.read_text().splitlines()] if file.exists() else []


def append(file: Path, line: Line) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")
    print({k: v for k, v in line.items() if k not in ("curve", "words")}, flush=True)


def settle(study: Study, file: Path) -> None:
    """Write the choice of the size once the sweep is whole."""
    found = lines(file)
    if (
        not study.swept
        or any("chosen" in line for line in found)
        or next(sweep(study, found), None) is not None
    ):
        return
    append(file, {"chosen": choose(found, list(study.sizes), MATCHED, UNCORRECTED)})


def missing(study: Study, found: list[Line]) -> Iterator[Job]:
    """The runs that have no line yet, in order."""
    if not study.swept:
        arms = {size: {MATCHED: (), **study.arms} for size in study.sizes}
        yield from _unrun(study, found, arms)
        return
    yield from sweep(study, found)
    chosen = next((line["chosen"] for line in found if "chosen" in line), None)
    if chosen is None:
        return
    yield from _unrun(study, found, {chosen: study.arms})
    yield from _unrun(study, found, study.further)


def sweep(study: Study, found: list[Line]) -> Iterator[Job]:
    """The runs of the uncorrected and the matched arm that have no line yet."""
    done = {(line.get("arm"), line.get("size"), line.get("seed")) for line in found}
    label, words = study.matched
    for seed in study.seeds:
        jobs = [Job(MATCHED, label, seed, words)]
        jobs += [Job(UNCORRECTED, size, seed, w) for size, w in study.sizes.items()]
        yield from (job for job in jobs if (job.arm, job.size, job.seed) not in done)


def _unrun(study: Study, found: list[Line], arms: Any) -> Iterator[Job]:
    done = {(line.get("arm"), line.get("size"), line.get("seed")) for line in found}
    for seed in study.seeds:
        for size, by_name in arms.items():
            for arm, words in by_name.items():
                if (arm, size, seed) not in done:
                    yield Job(arm, size, seed, (*study.sizes[size], *words))


def run(study: Study, job: Job) -> Line:
    """Run one job and sum it up. Raises RuntimeError when the command fails."""
    words = [f"experiment={study.experiment}", *job.words, f"seed={job.seed}"]
    with tempfile.TemporaryDirectory(prefix="rlcore-evidence-") as folder:
        by = run_trl if job.arm in study.by_trl else run_rlcore
        found = by(words, study.metric, Path(folder) / "run")
    accuracies = [accuracy for _, accuracy in found["curve"]]
    return {
        "arm": job.arm,
        "size": job.size,
        "seed": job.seed,
        "final": accuracies[-1],
        "best": max(accuracies),
        "collapse": collapse_step(found["curve"]),
        **found,
        "machine": machine(),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "sources": source_digest(ROOT, study.sources),
        "words": words,
    }


def run_rlcore(words: list[str], metric: str, run_dir: Path) -> Line:
    """What a run of rlcore showed. `curve` has (step, accuracy) of each evaluation, `clock` the
    training seconds since the start at which that step ended."""
    done = rlcore("train", *words, *QUIET, run_dir=run_dir, every_s=10)
    rows = done.rows
    decoded = sum(row.get("time/rollout_s", 0.0) for row in rows)
    return {
        "kl": _mean(rows, "mismatch/kl_k3"),
        "ess": _mean(rows, "mismatch/ess"),
        "acceptance": _mean(rows, "mismatch/acceptance"),
        "clipped": _mean(rows, "policy/clip_high_share"),
        "rapid clipped": _mean(rows, "correction/rapid/clipped_share"),
        "staleness": _mean(rows, "staleness/mean"),
        "decoded_per_s": sum(row["train/tokens"] for row in rows) / decoded if decoded else None,
        "steps": len(rows),
        "seconds": round(done.seconds, 1),
        "config": config_digest(run_dir / "config.yaml"),
        "curve": [(row["step"], row[metric]) for row in rows if metric in row],
        "clock": [round(row["time/total_s"], 2) for row in rows if metric in row],
    }


def config_digest(file: Path) -> str:
    """Digest of a run's configuration without its seed, which seeds of one arm share."""
    text = "\n".join(
        row
        for row in file.read_text().splitlines()
        if not row.startswith(("seed:", "run_dir:")) and "cache_dir:" not in row
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _mean(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return statistics.fmean(values) if values else None


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    ).stdout.strip()


if __name__ == "__main__":
    main()
