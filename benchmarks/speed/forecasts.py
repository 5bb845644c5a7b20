"""Forecasts of `rlcore plan` against runs: seconds a step and staleness.

python -m benchmarks.speed.forecasts --folder DIR [--cases base small ...] [--steps 14]
        [-- key=value ...]

Every run is forecast twice: by rates of its own, which shows what the simulation leaves out, and by
rates measured on the runs `base` and `small` with its own lengths of answers, which shows besides
whether rates carry over. Runs whose folder is there are not repeated. Two minutes a run.

In `one killed` the process of the only actor is killed in the middle. Its forecast is the mean over
those of its seeds in which one process dies while failures come as often as once a run, and takes
as long to start another one as this run did: what is tested is what a failure costs, not when it
comes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import machine, read_rows, rlcore, table
from rlcore.advisor.planner.measure import WARM_UP

KILLED = "one killed"
KILLED_AT = 32  # rows of metrics after which that happens
SEEDS = 20  # of its forecasts
PATIENCE_S = 600.0
CASES: dict[str, tuple[str, ...]] = {
    "base": (),
    "small": ("schedule.groups_per_step=16",),
    "on policy": ("schedule=on_policy",),
    "on policy, small": ("schedule=on_policy", "schedule.groups_per_step=16"),
    "eta 4": ("schedule.max_staleness=4",),
    "32 x 4": ("schedule.groups_per_step=32", "rollout.samples_per_prompt=4"),
    "H 4": ("schedule.steps_per_publish=4",),
    "two steps a phase": ("schedule.steps_per_phase=2", "schedule.groups_per_step=32"),
    "long": (
        "task.args.min_digits=16",
        "task.args.max_digits=32",
        "rollout.max_new_tokens=64",
        "schedule.groups_per_step=16",
    ),
    "finish": ("schedule.on_publish=finish",),
    KILLED: ("schedule.steps=96",),
    "three actors": ("actor.bf16.count=3", "actor.bf16.num_cpus=0.3"),
}
COMMON = (
    "experiment=quickstart",
    "model.warmup.steps=150",
    "evaluation.every=0",
    "evaluation.at_start=false",
    "checkpoint.every_s=0",
    "cluster.heartbeat_s=1",
    "logging.wandb=disabled",
    "logging.console=plain",
    "logging.report=false",
)
CALIBRATION = ("base", "small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("words", nargs="*", help="further overrides")
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    words = [*COMMON, f"model.warmup.cache_dir={folder / 'warm'}", f"schedule.steps={args.steps}"]
    words += args.words
    names = list(dict.fromkeys([*CALIBRATION, *args.cases]))
    for name in names:
        run(folder, name, words)
    rates = rates_of(folder, *CALIBRATION)
    found = [compared(folder, name, words, rates) for name in names]
    print(f"\nForecasts against runs on {machine()}\n\n{table(found)}")


def run(folder: Path, name: str, words: list[str]) -> None:
    """Do a run unless it is there, and note the machine's load before and after it."""
    note = folder / f"{place(name)}.load"
    if note.exists():
        return
    before = os.getloadavg()[0]
    run_dir = folder / place(name)
    with ThreadPoolExecutor(1) as beside:
        outage = beside.submit(kill_an_actor, run_dir) if name == KILLED else None
        rlcore("train", *words, *CASES[name], run_dir=run_dir)
        if outage is not None:
            (folder / f"{place(name)}.outage").write_text(f"{outage.result():.2f}")
    note.write_text(f"{before:.1f} to {os.getloadavg()[0]:.1f}")
    print(f"{name}: done", flush=True)


def kill_an_actor(run_dir: Path) -> float:
    """Kill the actor of the run that this process has started there; the seconds until another one
    is in its place. Raises TimeoutError."""
    joined = "is in the rotation"
    log = run_dir.with_suffix(".log")
    wait(lambda: len(read_rows(run_dir)) >= KILLED_AT, f"{KILLED_AT} steps")
    before, begun = log.read_text(errors="replace").count(joined), time.monotonic()
    [actor] = [
        p
        for p in psutil.Process().children(recursive=True)
        if "".join(p.cmdline()[:1]).startswith("ray::RolloutActor")
    ]
    actor.kill()
    wait(lambda: log.read_text(errors="replace").count(joined) > before, "another actor")
    return time.monotonic() - begun


def wait(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"no {what} within {PATIENCE_S:g} s")
        time.sleep(0.05)


def place(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")


def rates_of(folder: Path, *names: str) -> dict[str, Any]:
    """What `rlcore plan measure` says of these runs together."""
    out = folder / f"{place('+'.join(names))}.json"
    runs = ",".join(str(folder / place(name)) for name in names)
    command("plan", "measure", f"runs={runs}", f"out={out}")
    rates: dict[str, Any] = json.loads(out.read_text())
    return rates


def compared(folder: Path, name: str, words: list[str], rates: dict[str, Any]) -> dict[str, Any]:
    """A row of the table."""
    own = rates_of(folder, name)
    by_own = forecast(folder, name, words, own)
    by_others = forecast(folder, name, words, rates | {"lengths": own["lengths"]})
    rows = read_rows(folder / place(name))[WARM_UP:-1]
    step_s = sum(r["time/step_s"] for r in rows) / len(rows)
    staleness = sum(r["staleness/mean"] for r in rows) / len(rows)
    waited = sum(r["time/wait_data_s"] for r in rows) / step_s / len(rows)
    return {
        "run": name,
        "s a step": step_s,
        "own rates": by_own["step_s"],
        "error": f"{by_own['step_s'] / step_s - 1:+.0%}",
        "others' rates": by_others["step_s"],
        "error ": f"{by_others['step_s'] / step_s - 1:+.0%}",
        "staleness": f"{staleness:.2f}",
        "forecasts": f"{by_own['staleness_mean']:.2f}, {by_others['staleness_mean']:.2f}",
        "learner waits": f"{waited:.0%}",
        "load": (folder / f"{place(name)}.load").read_text(),
    }


def forecast(folder: Path, name: str, words: list[str], rates: dict[str, Any]) -> dict[str, Any]:
    """What `rlcore plan` says of a run at these rates."""
    if name != KILLED:
        return planned(folder, name, words, rates)
    total = read_rows(folder / place(name))[-1]["time/total_s"]
    outage = float((folder / f"{place(name)}.outage").read_text())
    failing = rates | {"failures_per_day": 86400 / total}
    failing["actor"] = rates["actor"] | {"start_s": outage}
    found = [planned(folder, name, [*words, f"seed={n}"], failing) for n in range(SEEDS)]
    once = [row for row in found if row["replacements"] == 1]
    return {k: statistics.fmean(row[k] for row in once) for k in ("step_s", "staleness_mean")}


def planned(folder: Path, name: str, words: list[str], rates: dict[str, Any]) -> dict[str, Any]:
    file, out = folder / f"{place(name)}.rates.json", folder / f"{place(name)}.plan.json"
    file.write_text(json.dumps(rates))
    command("plan", *words, *CASES[name], "run_dir=unused", f"rates={file}", f"out={out}")
    [found] = json.loads(out.read_text())
    return dict(found)


def command(*words: str) -> None:
    """Run `rlcore WORDS`. Raises CalledProcessError."""
    program = str(Path(sys.executable).parent / "rlcore")
    subprocess.run([program, *words], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
