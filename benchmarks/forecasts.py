"""Forecasts of `rlcore plan` against runs: seconds a step and staleness.

python benchmarks/forecasts.py --folder DIR [--cases base small ...] [--steps 14] [-- key=value ...]

Every run is forecast twice: by rates of its own, which shows what the simulation leaves out, and by
rates measured on the runs `base` and `small` with its own lengths of answers, which shows besides
whether rates carry over. Runs whose folder is there are not repeated. Two minutes a run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import machine, read_rows, rlcore, table

from rlcore.planner.measure import WARM_UP

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
    rlcore("train", *words, *CASES[name], run_dir=folder / place(name))
    note.write_text(f"{before:.1f} to {os.getloadavg()[0]:.1f}")
    print(f"{name}: done", flush=True)


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
