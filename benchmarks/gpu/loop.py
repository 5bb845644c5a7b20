"""Parts of `check.py` that train: the whole loop on one GPU. `loop`: half of it for the engine and
half for the learner, three steps and a resume of two more. `colocated`: all of it for both in turn,
two phases of two steps. `pair`: on two GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from reference import LIMITS, where_they_agree
from setting import Row, Setting

from rlcore.metrics.rows import run_rows

STEPS = 3
COMMON = (
    "experiment=quickstart",
    "schedule=on_policy",
    f"schedule.steps={STEPS}",
    "schedule.groups_per_step=8",
    "rollout.samples_per_prompt=4",
    "model.warmup.steps=10",
    "algorithm.entropy_coef=0.01",  # moves the weights, whatever the rewards
    "checkpoint.every=1",
    "evaluation.every=0",
    "evaluation.at_start=false",
    "logging.report=false",
    "logging.wandb=disabled",
)
HALVES = (
    "learner=gpu",
    "learner.num_gpus=0.5",
    "actor.bf16.num_gpus=0.5",
    "actor.bf16.gpu_memory_utilization=0.4",
    "actor.bf16.enforce_eager=true",  # graphs and compilation would take the part's minutes
    "cluster.transport=ipc",
    "cluster.start_timeout_s=400",
)
APART = (
    "learner=gpu",
    "actor.bf16.num_gpus=1",
    "actor.bf16.enforce_eager=true",
    "cluster.transport=nccl",
    "cluster.start_timeout_s=200",
)
# layers of 0.2 B parameters, so that communication takes time
ZERO3 = ("learner=zero3", "learner.ranks=2", "model.warmup.steps=20")
PHASES, STEPS_PER_PHASE = 2, 2
# An untrained model, which an entropy bonus moves whatever its rewards: no warm-up is waited for.
TURNS = (
    "experiment=quickstart",
    "schedule=large_batch",
    "correction=[rapid]",
    "algorithm=rapid",
    "algorithm.entropy_coef=0.01",
    f"schedule.steps={PHASES * STEPS_PER_PHASE}",
    f"schedule.steps_per_publish={STEPS_PER_PHASE}",
    "schedule.groups_per_step=8",
    "schedule.colocated=true",
    "rollout.samples_per_prompt=4",
    "model.warmup=null",
    "evaluation.every=0",
    "evaluation.at_start=false",
    "checkpoint.at_end=false",
    "learner.offload_while_sampling=true",
    "logging.report=false",
    "logging.wandb=disabled",
)
WHOLE = (
    "learner=gpu",
    "learner.zero_stage=1",
    "learner.lr=1e-4",
    "actor.bf16.num_gpus=1",
    "actor.bf16.gpu_memory_utilization=0.8",
    "actor.bf16.enforce_eager=true",
    "cluster.transport=ipc",
    "cluster.start_timeout_s=200",
    # 0.2 B parameters: enough to see in what is freed
    "model.fresh.hidden_size=1024",
    "model.fresh.intermediate_size=4096",
    "model.fresh.layers=12",
)


def command(s: Setting, part: str, name: str, words: Sequence[str]) -> None:
    """Run a command and add a row with its time; its output is the part's, so that a part ended at
    its deadline shows how far it came."""
    start = time.monotonic()
    program = "import sys; from rlcore.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program, *words])
    if done.returncode:
        sys.exit(f"{name}: exit code {done.returncode}")
    s.add(part, {"command": name, "seconds": time.monotonic() - start})


def metrics(run_dir: Path) -> list[Row]:
    return run_rows(run_dir)


def pair(s: Setting) -> None:
    """Weights from one GPU to the other, whole and changes alone; then two ranks at ZeRO-3."""
    largest = LIMITS["cpu" if s.small else "cuda"]
    for name, every in (("whole sets", 1), ("changes", 2)):
        run_dir = s.folder / f"pair-{every}"
        words = ["train", *COMMON, *(() if s.small else APART), f"run_dir={run_dir}"]
        command(s, "pair", name, [*words, f"cluster.full_weights_every={every}"])
        gaps: Row = {"mean |dlogp|": max(r["mismatch/abs_dlogp_mean"] for r in metrics(run_dir))}
        speed = {"publish s": metrics(run_dir)[-1]["time/publish_s"]}
        s.add("pair", {"weights": name, **where_they_agree(gaps, largest, speed)})
    for overlap in ("true", "false"):
        words = ["sft", *COMMON, *ZERO3, *(() if s.small else ("learner.num_gpus=1",))]
        own = (f"run_dir={s.folder / f'zero3-{overlap}'}", f"learner.overlap_comm={overlap}")
        command(s, "pair", f"ZeRO-3, overlap_comm={overlap}", [*words, *own])


def colocated(s: Setting) -> None:
    """Train two phases; a row for each step, and one for all."""
    run_dir = s.folder / "colocated"
    words = [*TURNS, *(("cluster.transport=gloo",) if s.small else WHOLE)]
    command(s, "colocated", "train", ["train", *words, f"run_dir={run_dir}"])
    rows = metrics(run_dir)
    for row in rows:
        s.add("colocated", {"step": row["step"], **turns_of(row)})
    s.add("colocated", turns(rows, LIMITS["cpu" if s.small else "cuda"]))


def turns_of(row: Row) -> Row:
    """What a step's row says of memory and of the time that turns cost."""
    names = ("asleep_s", "sleep_s", "wake_s", "learner_release_s", "learner_reclaim_s", "publish_s")
    said = {name: row[f"time/{name}"] for name in names if f"time/{name}" in row}
    freed = {n.partition("/")[2]: v for n, v in row.items() if n.startswith("colocated/")}
    return {"mean |dlogp|": row["mismatch/abs_dlogp_mean"], **said, **freed}


def turns(rows: list[Row], largest: float) -> Row:
    """What the first step of each phase says, whose policy is what the engine sampled with;
    `largest`: mean |dlogp| that counts as equal.

    Raises RuntimeError unless every step is there once.
    """
    steps = [r["step"] for r in rows]
    if steps != list(range(1, PHASES * STEPS_PER_PHASE + 1)):
        raise RuntimeError(f"the run has steps {steps}")
    first = [r["mismatch/abs_dlogp_mean"] for r in rows[::STEPS_PER_PHASE]]
    gaps: Row = {"mean |dlogp|": max(first)}
    return {"steps": len(steps), **where_they_agree(gaps, largest, turns_of(rows[-1]))}


def loop(s: Setting) -> None:
    """Train, then resume; a row for each command and one for the steps of both."""
    run_dir = s.folder / "run"
    words = [*COMMON, *(() if s.small else HALVES)]
    for name, own in (
        ("train", [*words, f"run_dir={run_dir}"]),
        ("resume", [f"run_dir={run_dir}", "resume=auto", f"schedule.steps={STEPS + 2}"]),
    ):
        command(s, "loop", name, ["train", *own])
    s.add("loop", summary(run_dir / "metrics.jsonl", LIMITS["cpu" if s.small else "cuda"]))


def summary(metrics: Path, largest: float) -> Row:
    """What the rows of a run that was resumed say; `largest`: mean |dlogp| that counts as equal.

    Raises RuntimeError unless every step is there once and some had a gradient.
    """
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [r["step"] for r in rows]
    if steps != list(range(1, STEPS + 3)):
        raise RuntimeError(f"the run and its resume have steps {steps}, not 1 to {STEPS + 2}")
    gaps: Row = {"mean |dlogp|": max(r["mismatch/abs_dlogp_mean"] for r in rows)}
    last = rows[-1]
    if not any(r["grad_norm"] for r in rows):
        raise RuntimeError("no step moved the weights: publications carried equal ones")
    speeds = {
        "step s": last["time/step_s"],
        "publish s": last["time/publish_s"],
        "rollout tokens/s": last["throughput/rollout_tokens_per_s"],
    }
    return {"steps": len(steps), **where_they_agree(gaps, largest, speeds)}
