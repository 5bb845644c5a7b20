"""TRL's GRPOTrainer on a load of `peers.py`: `peer_trl.py JOB.json OUT.json`, in TRL's environment.

The job holds model, prompts with their answers, sizes and steps; OUT gets the seconds and the
sampled tokens of each step. With held-out problems in the job, every so many steps the share that
the model answers right by greedy decoding, outside the clock. rlcore cannot be imported here.
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
from peft import LoraConfig
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


class Exam(TrainerCallback):
    """Greedy accuracy on held-out problems before training and every so many steps."""

    def __init__(self, job: dict[str, Any], tokenizer: Any) -> None:
        self.curve: list[tuple[int, float]] = []
        self.clock: list[float] = []  # training seconds at each point of the curve
        self._heldout = job.get("heldout", [])
        self._every, self._last = job.get("every", 0), job["steps"]
        self._tokenizer, self._max_tokens = tokenizer, job["max_tokens"]
        self._begun = self._spent = 0.0

    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        self._begun = time.monotonic()
        self._ask(1, model)

    def on_step_end(self, _: Any, state: Any, __: Any, model: Any, **___: Any) -> None:
        step = state.global_step
        if self._every and (step % self._every == 0 or step == self._last):
            self._ask(step, model)

    def _ask(self, step: int, model: Any) -> None:
        if not self._heldout:
            return
        start = time.monotonic()
        self.clock.append(round(start - self._begun - self._spent, 2))
        asked = self._tokenizer(
            [p["prompt"] for p in self._heldout], return_tensors="pt", padding=True
        )
        model.eval()
        with torch.no_grad():
            out = model.generate(
                input_ids=asked["input_ids"],
                attention_mask=asked["attention_mask"],
                do_sample=False,
                max_new_tokens=self._max_tokens,
            )
        model.train()
        texts = self._tokenizer.batch_decode(
            out[:, asked["input_ids"].shape[1] :], skip_special_tokens=True
        )
        right = [t.strip() == p["answer"] for t, p in zip(texts, self._heldout)]
        self.curve.append((step, sum(right) / len(right)))
        self._spent += time.monotonic() - start


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
        lr_scheduler_type=job.get("lr_schedule", "constant"),
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        max_grad_norm=1.0,
        loss_type=job.get("loss", "grpo"),
        beta=0.0,
    )


def main() -> None:
    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(job["threads"])
    clock, reward = Clock(), Reward()
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    exam = Exam(job, tokenizer)
    adapter = None
    if job.get("lora"):
        lora = job["lora"]
        adapter = LoraConfig(
            r=lora["rank"], lora_alpha=lora["alpha"], target_modules=lora["targets"]
        )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=reward,
        args=settings(job, out),
        train_dataset=Dataset.from_list(job["problems"]),
        callbacks=[clock, exam],
        peft_config=adapter,
    )
    trainer.train()
    found: dict[str, Any] = {
        "version": trl.__version__,
        "step_s": [b - a for a, b in zip(clock.ends, clock.ends[1:])],
        "cpu_s": [b - a for a, b in zip(clock.used, clock.used[1:])],
        "tokens": reward.tokens,
    }
    if exam.curve:
        found |= {"curve": exam.curve, "clock": exam.clock}
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
