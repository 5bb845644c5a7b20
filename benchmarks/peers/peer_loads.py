"""The loads of `peers.py`: what a step consists of, for rlcore and for each peer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.peer_adapters import Rlcore
from rlcore.commands.warm_up import kept_model
from rlcore.config.compose import load as compose
from rlcore.config.schema import RunConfig
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.models.text import encode_prompt, load_tokenizer
from rlcore.seeding import derive_seed
from rlcore.tasks import make_task

ASYNC, ON_POLICY = "rlcore", "rlcore, on policy"
SMOLLM2 = Path("cache/models/smollm2-135m")
DIGITS = "0123456789="
LONG_PROMPT = 512  # tokens
# of every answer that is not the right one 0: nothing has to be learned here
GRADER = "def right(item, response):\n    return float(response.strip() == item.answer)\n"


@dataclass(frozen=True, slots=True)
class Load:
    """What a step consists of, and how many steps are run."""

    key: str
    name: str
    groups: int
    max_tokens: int
    max_len: int  # positions of the model
    steps: Mapping[str, int]  # by who runs
    samples: int = 8
    lr: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.95)
    threads: int = 2
    seed: int = 0
    words: tuple[str, ...] = field(default=())  # of rlcore, besides those of sizes

    @property
    def sequences(self) -> int:
        """Of a step."""
        return self.groups * self.samples


DEMO = ("experiment=demo", "learner.lr_warmup_steps=0", "rollout.stop=[]", "model.max_len=64")
REAL_STEPS = {ASYNC: 7, ON_POLICY: 5, "peer": 3}
LOADS = (
    Load("short", "short and even", 64, 16, 128, {ASYNC: 13, ON_POLICY: 10, "peer": 7}),
    Load("long-tailed", "long-tailed", 16, 384, 512, {ASYNC: 10, ON_POLICY: 6, "peer": 3}),
    Load("full", "short, hardly ended early", 64, 16, 128, {ASYNC: 13, ON_POLICY: 10, "peer": 7}),
    Load("adapter", "SmolLM2-135M, adapter", 16, 8, 64, REAL_STEPS, words=DEMO),
    Load("whole", "SmolLM2-135M, whole", 16, 8, 64, REAL_STEPS, words=(*DEMO, "learner.lora=null")),
    Load("prompts", "prompts of 512 tokens", 16, 16, 640, {ASYNC: 10, ON_POLICY: 6, "peer": 4}),
)


def job_of(load: Load, folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """Everything that a run of this load depends on. `words`: further overrides of rlcore."""
    count = load.groups * max(load.steps.values())
    model, own = model_of(load, folder), list(load.words)
    if load.key == "prompts":
        problems, more = long_problems(folder, count)
        own += more
    else:
        problems = problems_of(composed(load, own), model, count)
    described = {k: v for k, v in asdict(load).items() if k not in ("key", "name", "words")}
    lora = composed(load, own).learner.lora
    adapter = None if lora is None else {"rank": lora.rank, "alpha": lora.alpha}
    if lora is not None and adapter is not None:
        adapter |= {"targets": list(lora.targets)}
    job = {**described, "load": load.name, "model": model, "problems": problems}
    return job | {"words": [*own, *words], "lora": adapter}


def composed(load: Load, words: Sequence[str]) -> RunConfig:
    """rlcore's configuration of a load."""
    return compose([*Rlcore.named(words), "run_dir=unused"])


def problems_of(config: RunConfig, model: str, count: int) -> list[dict[str, str]]:
    """Prompts as rlcore renders them, and their answers."""
    ((label, spec),) = config.tasks.items()
    task, tokenizer = make_task(spec.name, spec.args, label=label), load_tokenizer(model)
    problems = []
    for index in range(count):
        item = task.item("train", index)
        ids = encode_prompt(tokenizer, item.opening(), config.model)
        problems.append({"prompt": tokenizer.decode(ids), "answer": item.answer})
    return problems


def long_problems(folder: Path, count: int) -> tuple[list[dict[str, str]], list[str]]:
    """Digits in a row, the same for everybody, and rlcore's words for a file of them."""
    rows = []
    for index in range(count):
        drawn = derive_seed(0, "long-prompt", index)
        digits = str(drawn) * (LONG_PROMPT // len(str(drawn)) + 1)
        rows.append({"question": f"{digits[: LONG_PROMPT - 1]}=", "answer": "0"})
    path, grader = folder / "long-prompts.jsonl", folder / "right.py"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    grader.write_text(GRADER)
    args = f"task.args={{train_path: {path}, grader: '{grader}:right'}}"
    problems = [{"prompt": row["question"], "answer": row["answer"]} for row in rows]
    return problems, ["task=file", args]


def model_of(load: Load, folder: Path) -> str:
    """The folder of a load's model, made if it is not there."""
    if load.key == "short":
        return short_model(folder)
    if load.key in ("adapter", "whole"):
        return str(SMOLLM2.absolute())
    # Random weights: each next token ends the answer with a chance of one in so many tokens, which
    # makes 125 tokens in the mean where 384 are allowed, and 16 of 16 nearly always
    vocab = {"long-tailed": 132, "full": 1024, "prompts": 1024}[load.key]
    path = folder / ("long-model" if load.key == "long-tailed" else f"random-{load.key}")
    if not path.exists():
        spec = FreshModelSpec(vocab_size=vocab)
        build_fresh_model(path, DIGITS, spec, seed=1, max_len=load.max_len)
    return str(path)


def short_model(folder: Path) -> str:
    """The quickstart's, warmed up: its answers are short and end by themselves."""
    config = compose(["experiment=quickstart", "run_dir=unused"])
    if kept_model(config) is None:
        print("warming up the quickstart's model: a minute", flush=True)
        Rlcore().warm_up(folder / "warm-up")
    path = kept_model(config)
    assert path is not None
    return path
