"""TRL's GRPOTrainer on a load of `peers.py`: `peer_trl.py JOB.json OUT.json`, in TRL's environment.

The job holds model, prompts with their answers, sizes and steps; OUT gets the seconds and the
sampled tokens of each step. rlcore cannot be imported here.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Notes when each optimizer step ended, and the processor time used until then."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.used: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._note()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._note()

    def _note(self) -> None:
        own = resource.getrusage(resource.RUSAGE_SELF)
        self.ends.append(time.monotonic())
        self.used.append(own.ru_utime + own.ru_stime)


class Reward:
    """1 for the right answer, and a count of the sampled tokens."""

    __name__ = "right"

    def __init__(self) -> None:
        self.tokens: list[int] = []  # of each call, which is one a generation

    def __call__(
        self, completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        self.tokens.append(sum(len(ids) for ids in completion_ids))
        return [float(text.strip() == right) for text, right in zip(completions, answer)]


def settings(job: dict[str, Any], out: Path) -> GRPOConfig:
    """rlcore's quickstart in TRL's words; what is not named is TRL's default."""
    rows = job["groups"] * job["samples"]
    return GRPOConfig(
        output_dir=str(out.with_suffix(".trainer")),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=job["seed"],
        max_steps=job["steps"],
        per_device_train_batch_size=job["rows"],
        gradient_accumulation_steps=rows // job["rows"],
        num_generations=job["samples"],
        max_completion_length=job["max_tokens"],
        shuffle_dataset=False,
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        max_grad_norm=1.0,
        loss_type="grpo",
        beta=0.0,
    )


def main() -> None:
    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(job["threads"])
    clock, reward = Clock(), Reward()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        reward_funcs=reward,
        args=settings(job, out),
        train_dataset=Dataset.from_list(job["problems"]),
        callbacks=[clock],
    )
    trainer.train()
    found = {
        "version": trl.__version__,
        "step_s": [b - a for a, b in zip(clock.ends, clock.ends[1:])],
        "cpu_s": [b - a for a, b in zip(clock.used, clock.used[1:])],
        "tokens": reward.tokens,
    }
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
