"""Trains a small model with the page's trainer, and with TRL's own: `trl_run.py MODEL OUT`. Run by
test_trl.py, with TRL and the page's block on the path."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

MODEL, OUT = sys.argv[1:]
own = GRPOTrainer._generate_and_score_completions
noise = 0.0


def with_an_actor(self: Any, inputs: Any) -> Any:
    """Stands for vLLM: an actor whose log-prob of every other token differs by `noise`."""
    batch = own(self, inputs)
    ref = batch["old_per_token_logps"]  # there, because a generation serves several steps
    batch["sampling_per_token_logps"] = ref - noise * (torch.arange(ref.shape[1]) % 2)
    return batch


GRPOTrainer._generate_and_score_completions = with_an_actor
from block import CorrectedTrainer  # noqa: E402
from writing import WritingTrainer  # noqa: E402


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text)) % 3) for text in completions]


def train(trainer_class: type[GRPOTrainer]) -> tuple[torch.Tensor, Any]:
    """The weights after four steps, and the trainer."""
    config = GRPOConfig(
        output_dir=OUT,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        seed=1,
        per_device_train_batch_size=4,
        num_generations=4,
        steps_per_generation=4,
        gradient_accumulation_steps=2,
        max_completion_length=6,
        max_steps=4,
        beta=0.0,
        learning_rate=1e-2,
        gradient_checkpointing=False,
        loss_type="dapo",
        disable_tqdm=True,
    )
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [f"{i}+{i}=" for i in range(10)] * 4}),
    )
    trainer.train()
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]), trainer


def signals(trainer: Any) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.found.items()}


theirs, _ = train(GRPOTrainer)
matched, first = train(CorrectedTrainer)
noise = 0.3
mismatched, second = train(CorrectedTrainer)
train(WritingTrainer)
result = {
    "matched": signals(first),
    "mismatched": signals(second),
    "from_trl": float((matched - theirs).abs().max()),
    "moved": float((mismatched - matched).abs().max()),
    "steps": second.state.global_step,
}
print("RESULT" + json.dumps(result))
