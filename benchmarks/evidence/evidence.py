"""Tests a paper's claim at small scale, over seeds: runs what is missing, writes table and figure.

    python -m benchmarks.evidence.evidence NAME [NAME ...] [--minutes 60] [--only-page]
        [--background]

NAME is a study of `evidence_studies.py` or `evidence_programme.py`. Each finished run is one line
of `benchmarks/results/evidence/NAME.jsonl`; a run that has a line is not run again, so the command
can be stopped and continued. Several commands may run side by side (`taskset` gives each a core):
each takes runs that no other has taken, and goes on to the next NAME when a study has none left. A
run that needs the machine alone starts only when no other is under way, and keeps others from
starting. Order of the runs:

1. The sweep: the uncorrected arm at each size of the mismatch, and the matched arm, every seed.
2. The choice, written to the same file once: the smallest size at which the uncorrected arm ends
   at least ten points of held-out accuracy below the matched one (mean over seeds, paired) or
   collapses in most seeds. If there is none, the page says so.
3. Every method at that size, with the paper's own settings; then the further arms, whose sizes
   the study names.

A study without a sweep runs, seed after seed, its arms at all its sizes; then the further arms.

The page `NAME.md` beside them keeps its text; the block between its two markers, and the figure,
are made from the lines. The policy is evaluated on a plain engine with its own weights, never on
the degraded actor (but in `strata`, whose page says so).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.evidence.evidence_held import settled
from benchmarks.evidence.evidence_page import PAGES, write_page, write_programme
from benchmarks.evidence.evidence_programme import PROGRAMME
from benchmarks.evidence.evidence_studies import STUDIES as TESTED
from benchmarks.evidence.evidence_studies import UNCORRECTED, Study, Words
from benchmarks.evidence.evidence_tables import Line, choose, collapse_step, source_digest
from benchmarks.evidence.evidence_trl import run_trl
from benchmarks.harness import again, machine, read_rows, rlcore
from rlcore.commands.warm_up import kept_model
from rlcore.config.compose import load

STUDIES: dict[str, Study] = {
    **TESTED,
    **{name: registered.study for name, registered in PROGRAMME.items()},
}
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "evidence"
CLAIMS = ROOT / "cache" / "evidence"  # a lock for each run under way
WAIT_S = 5.0
QUIET = ("logging=quiet",)


@dataclass(frozen=True)
class Job:
    """One run: an arm at a size, with a seed."""

    arm: str
    size: str
    seed: int
    words: Words
    parts: tuple[Words, ...] = ()  # what a run that is resumed sets in each of its parts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=list(STUDIES), metavar="NAME")
    parser.add_argument("--minutes", type=float, default=120, help="start no run after these")
    parser.add_argument("--only-page", action="store_true", help="run nothing, write the page")
    parser.add_argument("--background", action="store_true", help="detached, at low priority")
    args = parser.parse_args()
    if args.background:
        print(f"runs as process {start_in_background(sys.argv[1:])}")
        return
    stop = time.monotonic() + 60 * args.minutes
    while not args.only_page and time.monotonic() < stop:
        due = {name: list(missing(STUDIES[name], lines(results(name)))) for name in args.names}
        if not any(due.values()):
            break
        if not any(run_first_free(name, jobs, stop) for name, jobs in due.items()):
            time.sleep(WAIT_S)  # other commands run what is left
    for name in args.names:
        if name in TESTED or (PAGES / f"{name}.md").exists():  # registered studies may have one
            write_page(name, STUDIES[name], lines(results(name)), _digest(STUDIES[name]))
    if set(args.names) & set(PROGRAMME):
        write_programme(PROGRAMME, {name: lines(results(name)) for name in PROGRAMME})


def start_in_background(words: Sequence[str]) -> str:
    """Start this program again, at the lowest priority and in a session of its own, so that it
    outlives the terminal; says which process it is and where its output goes."""
    command = [*again(__spec__), *(w for w in words if w != "--background")]
    CLAIMS.mkdir(parents=True, exist_ok=True)
    log = CLAIMS / "background.log"
    with log.open("a") as out:
        started = subprocess.Popen(
            ["nice", "-n", "19", *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return f"{started.pid}, output in {log}"


def results(name: str) -> Path:
    return RESULTS / f"{name}.jsonl"


def run_first_free(name: str, jobs: Sequence[Job], stop: float) -> bool:
    """Run the first job that no other command has taken; False if none may start.

    stop: value of the monotonic clock after which none may."""
    study = STUDIES[name]
    with place(alone=study.alone, stop=stop) as given:
        for job in jobs if given else ():
            with locked(CLAIMS / f"{name}, {job.arm}, {job.size}, {job.seed}") as own:
                if own and (job.arm, job.size, job.seed) not in _done(lines(results(name))):
                    append(study, results(name), run(study, job))
                    return True
    return False


@contextlib.contextmanager
def place(*, alone: bool, stop: float) -> Iterator[bool]:
    """A place on the machine, or all of it: while a run waits for that, no other starts."""
    queue, whole = CLAIMS / "queue", CLAIMS / "machine"
    if not alone:
        with locked(whole, shared=True) as given:
            yield given and is_free(queue, shared=True)
        return
    with locked(queue) as first:
        while first and not is_free(whole) and time.monotonic() < stop:
            time.sleep(WAIT_S)
        with locked(whole) as given:
            yield first and given


def is_free(file: Path, *, shared: bool = False) -> bool:
    with locked(file, shared=shared) as given:
        return given


@contextlib.contextmanager
def locked(file: Path, *, shared: bool = False) -> Iterator[bool]:
    """Lock a file for this process if no other holds it, and say whether that succeeded.

    The lock ends with the process, however that ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as held:
        try:
            fcntl.flock(held, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def lines(file: Path) -> list[Line]:
    """The finished runs of a file, and its choice of a size if that has been made."""
    return [json.loads(row) for row in file.read_text().splitlines()] if file.exists() else []


def append(study: Study, file: Path, line: Line) -> None:
    """Add a finished run, and the choice of the size once the sweep is whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        fcntl.flock(out, fcntl.LOCK_EX)  # two commands that end the sweep make one choice
        _write(out, line)
        found = lines(file)
        decided = any("chosen" in made for made in found)
        if study.swept and not decided and next(sweep(study, found), None) is None:
            _write(out, {"chosen": choose(found, list(study.sizes), study.reference, UNCORRECTED)})


def _write(out: IO[str], line: Line) -> None:
    out.write(json.dumps(line) + "\n")
    out.flush()
    print({k: v for k, v in line.items() if k not in ("curve", "words", "watched")}, flush=True)


def missing(study: Study, found: list[Line]) -> Iterator[Job]:
    """The runs that have no line yet, in order."""
    if study.swept:
        yield from sweep(study, found)
        made = [line["chosen"] for line in found if "chosen" in line]
        if not made:
            return  # other commands still run the sweep
        at_chosen = {} if made[0] is None else {made[0]: study.arms}
        yield from _unrun(study, found, _cells(at_chosen))
    else:
        label, words = study.matched
        arms = _cells({size: study.arms for size in study.sizes})
        yield from _unrun(study, found, [(label, study.reference, words), *arms])
    yield from _unrun(study, found, _cells(study.further))


def sweep(study: Study, found: list[Line]) -> Iterator[Job]:
    """The runs of the uncorrected and the matched arm that have no line yet."""
    done = _done(found)
    label, words = study.matched
    for seed in study.seeds:
        jobs = [Job(study.reference, label, seed, words)]
        jobs += [Job(UNCORRECTED, size, seed, w) for size, w in study.sizes.items()]
        yield from (job for job in jobs if (job.arm, job.size, job.seed) not in done)


def _cells(arms: Mapping[str, Mapping[str, Words]]) -> list[tuple[str, str, Words]]:
    """Size, arm and its words of each arm, which are given by size."""
    return [(size, arm, words) for size, own in arms.items() for arm, words in own.items()]


def _unrun(
    study: Study, found: list[Line], cells: Sequence[tuple[str, str, Words]]
) -> Iterator[Job]:
    done = _done(found)
    for seed in study.seeds:
        for size, arm, words in cells:
            own = settled(study, found, (*study.sizes.get(size, ()), *words))
            if (arm, size, seed) not in done and own is not None:
                yield Job(arm, size, seed, own, study.switching.get(size, ()))


def _done(found: list[Line]) -> set[tuple[str, str, int]]:
    return {(line["arm"], line["size"], line["seed"]) for line in found if "arm" in line}


def run(study: Study, job: Job) -> Line:
    """Run one job and sum it up. Raises RuntimeError when the command fails."""
    words = [f"experiment={study.experiment}", *job.words, f"seed={job.seed}"]
    with tempfile.TemporaryDirectory(prefix="rlcore-evidence-") as folder:
        run_dir = Path(folder) / "run"
        if job.arm in study.by_trl:
            found = run_trl(words, study.metric, run_dir)
        else:
            seconds = train(words, job.parts, run_dir, keep=bool(study.deployed))
            found = {**summary(run_dir, study), "seconds": round(seconds, 1)}
            found |= {"deployed": deploy(study, words, run_dir)} if study.deployed else {}
    accuracies = [accuracy for _, accuracy in found["curve"]]
    return {
        "arm": job.arm,
        "size": job.size,
        "seed": job.seed,
        "start": start_digest(words),
        "final": accuracies[-1],
        "best": max(accuracies),
        "collapse": collapse_step(found["curve"]),
        **found,
        "machine": machine(),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "sources": _digest(study),
        "words": words,
        **({"parts": job.parts} if job.parts else {}),
    }


def train(
    words: Sequence[str], parts: Sequence[Words], run_dir: Path, *, keep: bool = False
) -> float:
    """Run rlcore, with `parts` each for as many steps as the others; the seconds that it took.

    `keep`: leave a checkpoint of the last step."""
    command = ("train", *words, *QUIET)
    if not parts:
        at_end = f"checkpoint.at_end={str(keep).lower()}"
        done = rlcore(*command, at_end, run_dir=run_dir, every_s=10)
        return done.seconds
    seconds = 0.0
    steps = load([*words, f"run_dir={run_dir}"]).schedule.steps
    for number, part in enumerate(parts, 1):
        end = f"schedule.steps={steps * number // len(parts)}"
        resume = ("resume=auto",) if number > 1 else ()
        done = rlcore(*command, *part, end, *resume, run_dir=run_dir, every_s=10)
        seconds += done.seconds
    return seconds


def deploy(study: Study, words: Sequence[str], run_dir: Path) -> dict[str, float]:
    """Accuracy on the run's actors of each of the study's models that the run exports."""
    beside = run_dir.parent
    rlcore("export", f"out={beside / study.deployed[0]}", run_dir=run_dir, every_s=10)
    found = {}
    for folder in study.deployed:
        if (beside / folder).is_dir():
            own = (*words, f"model.path={beside / folder}", "evaluation.dense_actor=false")
            evaluated = beside / "evaluated" / folder
            rlcore("eval", *own, *QUIET, run_dir=evaluated, every_s=10)
            found[folder] = json.loads((evaluated / "eval.json").read_text())[study.metric]
    return found


def summary(run_dir: Path, study: Study) -> Line:
    """What a run of rlcore showed. `curve` has (step, accuracy) of each evaluation, `clock` the
    training seconds since the start at which that step ended, `watched` the means of the study's
    metrics over the steps up to each of them."""
    rows = read_rows(run_dir)
    evaluated = [row for row in rows if study.metric in row]
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
        "config": config_digest(run_dir / "config.yaml"),
        "curve": [(row["step"], row[study.metric]) for row in evaluated],
        "clock": [round(row["time/total_s"], 2) for row in evaluated],
        "watched": {
            name: means_between(rows, name, [row["step"] for row in evaluated])
            for name in study.watched
        },
    }


def start_digest(words: Sequence[str]) -> str:
    """SHA-256 of the weights that a run began from, by which runs are paired.

    Raises RuntimeError if the run has kept no warmed-up model."""
    config = load([*words, "run_dir=unused"])
    folder = config.model.path or kept_model(config)
    if folder is None:
        raise RuntimeError("the warmed-up model of the run is missing")
    digest = hashlib.sha256()
    for file in sorted(Path(folder).glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def means_between(
    rows: Sequence[Mapping[str, Any]], name: str, ends: Sequence[int]
) -> list[float | None]:
    """Means of a metric over the steps after one of `ends` and up to the next; None where no row
    has it. Four significant digits.

    Example: ends of 1 and 32 give the mean of step 1 and that of steps 2 to 32."""
    starts = [0, *ends[:-1]]
    parts = [[row for row in rows if a < row["step"] <= b] for a, b in zip(starts, ends)]
    means = [_mean(part, name) for part in parts]
    return [None if mean is None else float(f"{mean:.4g}") for mean in means]


def config_digest(file: Path) -> str:
    """Digest of a run's configuration without its seed, which seeds of one arm share."""
    text = "\n".join(
        row
        for row in file.read_text().splitlines()
        if not row.startswith(("seed:", "run_dir:")) and "cache_dir:" not in row
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest(study: Study) -> str:
    return source_digest(ROOT, study.sources)


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return statistics.fmean(values) if values else None


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    ).stdout.strip()


if __name__ == "__main__":
    main()
