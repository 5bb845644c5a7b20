"""The last part of `check.py`: the whole loop on one GPU, half for the engine and half for the
learner, three steps and a resume of two more."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from reference import LIMITS, where_they_agree
from setting import Row, Setting

STEPS = 3
COMMON = (
    "experiment=quickstart",
    "schedule=on_policy",
    f"schedule.steps={STEPS}",
    "schedule.groups_per_step=8",
    "rollout.samples_per_prompt=4",
    "model.warmup.steps=10",
    "checkpoint.every=1",
    "evaluation.every=0",
    "evaluation.at_start=false",
    "logging.wandb=disabled",
)
HALVES = (
    "learner=gpu",
    "learner.num_gpus=0.5",
    "actor.bf16.num_gpus=0.5",
    "actor.bf16.gpu_memory_utilization=0.4",
    "cluster.transport=ipc",
    "cluster.start_timeout_s=400",
)


def loop(s: Setting) -> None:
    """Train, then resume; a row for each command and one for the steps of both."""
    run_dir = s.folder / "run"
    words = [*COMMON, *(() if s.small else HALVES)]
    for name, command in (
        ("train", [*words, f"run_dir={run_dir}"]),
        ("resume", [f"run_dir={run_dir}", "resume=auto", f"schedule.steps={STEPS + 2}"]),
    ):
        start = time.monotonic()
        # its output is the part's, so that a part ended at its deadline shows how far it came
        done = subprocess.run(
            [sys.executable, "-c", "from rlcore.cli import main; main()", "train", *command]
        )
        if done.returncode:
            sys.exit(f"{name}: exit code {done.returncode}")
        s.add("loop", {"command": name, "seconds": time.monotonic() - start})
    s.add("loop", summary(run_dir / "metrics.jsonl", LIMITS["cpu" if s.small else "cuda"]))


def summary(metrics: Path, largest: float) -> Row:
    """What the rows of a run that was resumed say; `largest`: mean |dlogp| that counts as equal.

    Raises RuntimeError unless every step is there once.
    """
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [r["step"] for r in rows]
    if steps != list(range(1, STEPS + 3)):
        raise RuntimeError(f"the run and its resume have steps {steps}, not 1 to {STEPS + 2}")
    gaps: Row = {"mean |dlogp|": max(r["mismatch/abs_dlogp_mean"] for r in rows)}
    last = rows[-1]
    speeds = {
        "step s": last["time/step_s"],
        "publish s": last["time/publish_s"],
        "rollout tokens/s": last["throughput/rollout_tokens_per_s"],
    }
    return {"steps": len(steps), **where_they_agree(gaps, largest, speeds)}
