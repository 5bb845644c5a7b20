"""TRL's GRPOTrainer with a colocated vLLM: `trl_side.py JOB.json OUT.json`. It imports no rlcore.

The job has trials, each a micro-batch with or without Liger's layers; they share one engine. The
fastest is measured. OUT is written after each trial.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

GPU = torch.cuda.is_available()
Job = dict[str, Any]


def patch(pushes: list[float]) -> None:
    """Have the first trainer start the engine, and later ones use it and push their weights; the
    seconds of each push go to `pushes`."""
    engine: list[Any] = []
    whole = vllm_generation.VLLMGeneration
    start, push = whole._init_vllm, whole.sync_weights

    def shared(self: Any) -> None:
        if engine:
            self.llm, self._llm_weights_sleeping = engine[0], self.enable_sleep_mode
            return
        start(self)
        engine.append(self.llm)

    def timed(self: Any) -> None:
        begun = now()
        # layers of vLLM's CPU build are packed: TRL cannot load weights into them (dry run)
        push(self) if GPU else self.llm.reset_prefix_cache()
        pushes.append(now() - begun)

    whole._init_vllm, whole.sync_weights = shared, timed


def now() -> float:
    """Seconds, when the GPU has done what it was given."""
    if GPU:
        torch.cuda.synchronize()
    return time.monotonic()


class Clock(TrainerCallback):  # type: ignore[misc]
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ends.append(now())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(now())


class Coin:
    """A reward that costs nothing, and what was sampled."""

    __name__ = "coin"

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.at: list[float] = []

    def __call__(
        self, completions: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        self.at.append(time.monotonic())
        self.tokens.append(sum(len(ids) for ids in completion_ids))
        return [float(len(text) % 2) for text in completions]


def settings(job: Job, trial: Job, steps: int, out: Path) -> GRPOConfig:
    rows = job["groups"] * job["samples"]
    return GRPOConfig(
        output_dir=str(out.with_suffix(".trainer")),
        bf16=GPU,
        use_cpu=not GPU,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=0,
        max_steps=steps,
        per_device_train_batch_size=trial["rows"],
        gradient_accumulation_steps=rows // trial["rows"],
        num_generations=job["samples"],
        max_completion_length=job["max_tokens"],
        shuffle_dataset=False,
        learning_rate=1e-8,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        loss_type="grpo",
        beta=0.0,
        temperature=1.0,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=job["share"],
        vllm_max_model_length=job["max_len"],
        vllm_importance_sampling_mode="token_truncate",
        use_liger_kernel=trial["liger"],
        optim="adamw_torch_fused" if GPU else "adamw_torch",
    )


def run(job: Job, trial: Job, steps: int, out: Path, pushes: list[float]) -> Job:
    """Train some steps; the seconds and tokens of each."""
    clock, coin = Clock(), Coin()
    pushes.clear()
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    dtype = torch.bfloat16 if GPU else torch.float32
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=dtype, attn_implementation="sdpa"
        ),
        processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        reward_funcs=coin,
        args=settings(job, trial, steps, out),
        train_dataset=Dataset.from_list([{"prompt": p} for p in job["prompts"]]),
        callbacks=[clock],
    )
    try:
        trainer.train()
    finally:
        trainer.model = trainer.model_wrapped = trainer.optimizer = None
        trainer.vllm_generation = None
        del trainer
        emptied()
    return {
        **trial,
        "step_s": [b - a for a, b in zip(clock.ends, clock.ends[1:])],
        "generate_s": [a - b for a, b in zip(coin.at, clock.ends)],
        "push_s": [*pushes],
        "tokens": coin.tokens,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if GPU else None,
    }


def emptied() -> None:
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()


def tried(job: Job, trial: Job, out: Path, pushes: list[float]) -> Job:
    """A trial of some steps, or why it failed: another may work."""
    try:
        return run(job, trial, job["trial_steps"], out, pushes)
    except Exception as e:
        traceback.print_exc()
        return {**trial, "error": f"{type(e).__name__}: {str(e)[:300]}"}
    finally:
        emptied()


def main() -> None:
    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    pushes: list[float] = []
    found: Job = {"version": trl.__version__, "trials": []}
    with contextlib.ExitStack() as at_end:
        at_end.callback(lambda: out.write_text(json.dumps(found)))
        patch(pushes)
        for trial in job["trials"]:
            found["trials"].append(tried(job, trial, out, pushes))
            out.write_text(json.dumps(found))
        known = [t for t in found["trials"] if t.get("step_s")]
        best = min(known, key=lambda t: t["step_s"][-1]) if known else job["best"]
        if best is None:
            sys.exit("no trial has worked")
        found["best"] = {k: best[k] for k in ("rows", "liger")}
        found["measured"] = run(job, found["best"], job["steps"], out, pushes)


if __name__ == "__main__":
    main()
