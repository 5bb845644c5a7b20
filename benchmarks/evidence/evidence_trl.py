"""TRL's GRPOTrainer on an experiment of `evidence.py`: same model, task, sizes and optimizer."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.peer_adapters import Trl
from rlcore.commands.warm_up import kept_model
from rlcore.config.compose import load as compose
from rlcore.config.schema import RunConfig
from rlcore.seeding import derive_seed
from rlcore.tasks import make_task
from rlcore.types import Item

ENVIRONMENTS = Path(__file__).resolve().parents[2] / "cache" / "peers"


def run_trl(words: Sequence[str], metric: str, place: Path) -> dict[str, Any]:
    """What a run of TRL showed, in the words of `evidence.summary`. Raises RuntimeError without
    the warmed-up model, which rlcore's run of the same seed makes."""
    config = compose([*words, f"run_dir={place}"])
    peer = Trl(ENVIRONMENTS.resolve())
    peer.prepare()
    start = time.monotonic()
    try:
        found = peer.run(job_of(config), config.schedule.steps, place)
    except subprocess.CalledProcessError as e:
        raise RuntimeError(f"TRL failed: {e}") from e
    return {
        "steps": len(found["step_s"]),
        "seconds": round(time.monotonic() - start, 1),
        "config": f"TRL {found['version']}",
        "curve": found["curve"],
        "clock": found["clock"],
    }


def job_of(config: RunConfig) -> dict[str, Any]:
    """The job of `peer_trl.py` that does what a configuration says. Raises RuntimeError without the
    warmed-up model."""
    model = kept_model(config)
    if model is None:
        raise RuntimeError("the warmed-up model is missing: run rlcore with this seed first")
    (label,) = config.tasks
    task = make_task(label, dict(config.tasks[label].args), label=label)
    learner, schedule = config.learner, config.schedule
    groups, samples = schedule.groups_per_step, config.rollout.samples_per_prompt
    first = derive_seed(config.seed, "peer-prompts") % 1_000_000  # another order for each seed
    train = [task.item("train", first + i) for i in range(groups * schedule.steps)]
    return {
        "model": model,
        "problems": [_problem(item) for item in train],
        "heldout": [_problem(task.item("heldout", i)) for i in range(config.evaluation.prompts)],
        "every": config.evaluation.every,
        "groups": groups,
        "samples": samples,
        "rows": groups * samples,
        "max_tokens": config.rollout.max_new_tokens,
        "lr": learner.lr,
        "lr_schedule": "linear" if learner.lr_schedule == "linear" else "constant",
        "betas": list(learner.betas),
        "loss": "dapo",  # the mean over all tokens of the batch, as token-mean
        "seed": config.seed,
        "threads": 2,
    }


def _problem(item: Item) -> dict[str, str]:
    return {"prompt": item.question, "answer": item.answer}
