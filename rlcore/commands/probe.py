"""One optimizer step of a configured run, for real and in a folder of its own: whether it starts,
and how far apart actors and learner are before any training."""

from __future__ import annotations

import contextlib
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcore.commands.preflight import prepare
from rlcore.commands.train import train
from rlcore.commands.warm_up import fresh_model
from rlcore.config.corrections import CorrectionList
from rlcore.config.schema import RunConfig
from rlcore.errors import DeadlineExceeded, StageError, UserError
from rlcore.metrics.rows import Row, read_rows
from rlcore.metrics.run_folder import records

GROUPS, SAMPLES = 32, 2  # prompts, answers to each
NEW_TOKENS = 64  # of an answer, at most
WORST = 8  # tokens that are listed
BEFORE = 24  # characters of text before a token


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token. Example: Token("digits/train/3", "8043", "7", -1.25, "bf16-0")"""

    prompt_id: str
    before: str  # the end of the text before it
    text: str
    log_ratio: float  # log p_ref - log p_inf
    actor: str


@dataclass(frozen=True, slots=True)
class Probe:
    """What the step gave. `row`: of metrics.jsonl; empty where the run did not come so far."""

    seconds: float
    error: str = ""  # what kept the run from it; empty: nothing did
    row: Row = field(default_factory=dict)
    worst: Sequence[Token] = ()

    @property
    def started(self) -> bool:
        return not self.error


def probe(config: RunConfig, *, fresh: bool = False) -> Probe:
    """Sample a few hundred tokens of the training prompts with the run's own engines, and take one
    step on them with its own learner, without corrections. Nothing of it is kept.

    `fresh`: a model of random weights in the place of one that is warmed up. Raises UserError for
    what a run would refuse.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rlcore-doctor-") as folder:
        config = shortened(config, str(Path(folder) / "run"))
        if fresh:
            config = _with_fresh_model(config, Path(folder))
        run = Path(config.run_dir)
        error = ""
        with _quiet():
            try:
                train(config)
            except (StageError, DeadlineExceeded, OSError) as e:
                error = str(e)
        rows = read_rows(run / "metrics.jsonl")
        found = [r for file in sorted((run / "samples").glob("step_*")) for r in records(file)]
    seconds = time.monotonic() - began
    return Probe(seconds, error, rows[0] if rows else {}, worst_tokens(found))


def shortened(config: RunConfig, run_dir: str) -> RunConfig:
    """The run as it is measured: one synchronous step on a few prompts, without corrections,
    evaluations and checkpoints, which would change what is seen or take longer to see it."""
    short = {
        "schedule": {
            "steps": 1,
            "groups_per_step": min(config.schedule.groups_per_step, GROUPS),
            "steps_per_publish": 1,
            "steps_per_phase": None,
            "epochs": 1,
            "max_uses": 1,
            "max_staleness": 0,
            "on_publish": "finish",
        },
        "rollout": {
            "samples_per_prompt": min(config.rollout.samples_per_prompt, SAMPLES),
            "max_new_tokens": min(config.rollout.max_new_tokens, NEW_TOKENS),
        },
        "algorithm": {"dynamic_sampling": False, "keep_best": None},
        "evaluation": {"at_start": False, "prompts": 1, "samples": 1, "greedy": False, "tasks": {}},
        "checkpoint": {"every": 0, "every_s": 0.0, "at_end": False, "keep_best": None},
        "logging": {
            "console": "off",
            "wandb": "disabled",
            "prometheus_port": 0,
            "samples_per_step": GROUPS,
            "report": False,
        },
    }
    update: dict[str, Any] = {
        name: getattr(config, name).model_copy(update=changed) for name, changed in short.items()
    }
    update["correction"] = CorrectionList.model_validate({"none": {}})
    return config.model_copy(update=update | {"run_dir": run_dir, "resume": "never"})


def _with_fresh_model(config: RunConfig, folder: Path) -> RunConfig:
    """Its weights are random, so that nothing is trained first and nothing kept in a cache."""
    path = fresh_model(config, prepare(config), folder / "model")
    model = config.model.model_copy(update={"path": str(path), "fresh": None, "warmup": None})
    return config.model_copy(update={"model": model})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the processes print goes to stderr: stdout is the findings', possibly as JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def worst_tokens(samples: Sequence[dict[str, Any]], count: int = WORST) -> list[Token]:
    """The tokens whose ratio p_ref/p_inf is the furthest from 1, the furthest first."""
    found = []
    for sample in samples:
        ratios = sample.get("log_ratio") or []
        before, place = sample["prompt"], 0
        turns = sample.get("turns") or [{"observed": ""}]
        for turn, pieces in zip(turns, sample["pieces"]):
            before += turn["observed"]
            for text in pieces:
                ratio = ratios[place] if place < len(ratios) else None
                if ratio is not None and math.isfinite(ratio):
                    context = before[-BEFORE:]
                    token = Token(sample["prompt_id"], context, text, ratio, sample["actor"])
                    found.append(token)
                before += text
                place += 1
    return sorted(found, key=lambda token: -abs(token.log_ratio))[:count]


def refusal(config: RunConfig) -> str:
    """Why the run would be refused before anything starts; empty if it would not be."""
    try:
        with _quiet():
            prepare(config)
    except UserError as e:
        return str(e)
    return ""
