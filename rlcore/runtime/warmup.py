"""Supervised warm-up: worked answers of a task, through the same learner ranks and the same head pass as training."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from rlcore.config.schema import RunConfig, WarmupConfig
from rlcore.errors import UserError
from rlcore.models import build_fresh_model
from rlcore.runtime import options
from rlcore.runtime.cluster import get
from rlcore.runtime.placing import meeting, spawn_ranks
from rlcore.runtime.preflight import Prepared
from rlcore.runtime.prompts import PromptSource
from rlcore.seeding import derive_seed


def starting_model(config: RunConfig, prepared: Prepared, note: Callable[[str], None]) -> str:
    """The policy's starting folder: `model.path`, or a warmed-up fresh model, kept for runs with the same settings."""
    if config.model.path is not None:
        return config.model.path
    assert config.model.fresh is not None
    warmup = config.model.warmup
    fingerprint = {
        "model": config.model.fresh.model_dump(),
        "max_len": config.model.max_len,
        "warmup": warmup.model_dump(exclude={"cache_dir"}) if warmup else None,
        "task": [config.task.name, config.task.args],
        "seed": config.seed,
        "format": 1,
    }
    digest = hashlib.blake2b(json.dumps(fingerprint, sort_keys=True).encode(), digest_size=8).hexdigest()
    root = Path(warmup.cache_dir if warmup else WarmupConfig().cache_dir).absolute()
    kept = root / f"{options.task_label(config)}-{digest}"
    if kept.is_dir():
        note(f"starting model: {kept} (kept from an earlier run)")
        return str(kept)
    fresh = root / f".fresh-{digest}"
    alphabet = prepared.prompts.task.alphabet()
    assert alphabet is not None
    build_fresh_model(
        fresh,
        alphabet,
        seed=derive_seed(config.seed, "fresh-model"),
        max_len=config.model.max_len,
        **config.model.fresh.model_dump(),
    )
    if warmup is None:
        fresh.rename(kept)
        return str(kept)
    made = root / f".made-{digest}"
    shutil.rmtree(made, ignore_errors=True)
    supervise(config, warmup, prepared, str(fresh), made, note)
    made.rename(kept)
    shutil.rmtree(fresh)
    return str(kept)


def with_drafts(config: RunConfig, prepared: Prepared, note: Callable[[str], None]) -> RunConfig:
    """The same run with a folder for every draft that is to be made: a fresh model warmed up as the policy is."""
    actors = dict(config.actor)
    for label, actor in config.actor.items():
        if actor.draft_fresh is None:
            continue
        model = config.model.model_copy(update={"fresh": actor.draft_fresh})
        note(f"actor.{label}.draft_fresh: a draft of its own")
        path = starting_model(config.model_copy(update={"model": model}), prepared, note)
        actors[label] = actor.model_copy(update={"draft_path": path, "draft_fresh": None})
    return config.model_copy(update={"actor": actors})


def supervise(
    config: RunConfig, warmup: WarmupConfig, prepared: Prepared, start: str, out: Path, note: Callable[[str], None]
) -> None:
    """Train `start` on worked answers and write a Hugging Face folder to `out`. Raises UserError without answers."""
    tokenizer = prepared.tokenizer
    le = config.learner.model_copy(
        update={
            "lr": warmup.lr,
            "lr_warmup_steps": warmup.lr_warmup_steps,
            "lr_schedule": warmup.lr_schedule,
            "lora": None,
            "distill": None,
            "train_sparse": False,
            "lr_decay_steps": None,
            "lr_final": 0.0,
        }
    )
    schedule = config.schedule.model_copy(update={"steps": warmup.steps})
    algorithm = config.algorithm.model_copy(update={"kl_coef": 0.0})
    sft = config.model_copy(update={"learner": le, "schedule": schedule, "algorithm": algorithm})
    ranks = spawn_ranks(sft, le.ranks, None, "object_store", "")
    try:
        master = meeting(sft, ranks, le.port)
        _all(
            ranks,
            "start",
            lambda r: (options.learner(sft, start, r, master, prepared.pad_id),),
            "ranks to start",
            sft,
        )
        source = PromptSource(
            prepared.prompts.task,
            prepared.prompts._encode,
            run_seed=derive_seed(config.seed, "warm-up"),
            max_prompt_tokens=config.model.max_len,
        )
        began = time.monotonic()
        note(f"warm-up: {warmup.steps} supervised steps of {warmup.batch_size} worked answers")
        for step in range(warmup.steps):
            batch = [example(source, tokenizer) for _ in range(warmup.batch_size)]
            shares = [batch[r :: le.ranks] for r in range(le.ranks)]
            metrics = _all(ranks, "sft_step", lambda r: (step, shares[r]), f"warm-up step {step + 1}", sft)[0]  # noqa: B023
            if (step + 1) % 20 == 0 or step + 1 == warmup.steps:
                note(
                    f"warm-up step {step + 1}/{warmup.steps}  loss {metrics['loss/sft']:.4f}  "
                    f"{time.monotonic() - began:.0f} s"
                )
        _all(ranks, "export", lambda r: (str(out),), "the warmed-up model to be written", sft)
        tokenizer.save_pretrained(out)
    finally:
        for rank in ranks:
            ray.kill(rank)


def example(source: PromptSource, tokenizer: Any) -> tuple[list[int], list[int]]:
    """(prompt ids, answer ids with end of sequence) of the next training item. Raises UserError without an answer."""
    item = source.next()
    answer = source.task.worked_answer(item)
    if answer is None:
        raise UserError(
            f"task.name={source.task.name} has no worked answers to warm up on: set model.path to a trained model."
        )
    ids = tokenizer.encode(answer, add_special_tokens=False)
    return source.encode(item).tolist(), [*ids, tokenizer.eos_token_id]


def _all(
    ranks: list[Any], method: str, arguments: Callable[[int], tuple[Any, ...]], what: str, config: RunConfig
) -> list[Any]:
    refs = [getattr(rank, method).remote(*arguments(i)) for i, rank in enumerate(ranks)]
    return list(get(refs, timeout_s=config.schedule.step_timeout_s, what=what, key="schedule.step_timeout_s"))
