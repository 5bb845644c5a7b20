"""Trial answers of a model before a run: how long they are, and how many groups have a signal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.commands.try_task import Response, Trial, graded
from rlcore.config.schema import RunConfig
from rlcore.cores import asked_cores
from rlcore.interfaces import Split, Task
from rlcore.models.fresh import quiet_libraries
from rlcore.models.text import decode_response, encode_prompt, end_ids, padding
from rlcore.seeding import derive_seed
from rlcore.types import Item

GROUPS, SAMPLES = 8, 4
TRIAL_S = 120.0  # of sampling; what is unfinished then is not known to be cut off


@dataclass(frozen=True, slots=True)
class Tried:
    """32 answers. Lengths are in tokens, those that were cut off at the limit with it."""

    lengths: tuple[int, ...]
    limit: int
    asked: int  # the limit, if the time for sampling sufficed; `limit` is what was reached
    cut: float  # share of answers
    with_signal: int  # groups whose rewards differ
    groups: int
    mean: float | None  # reward; None: no score

    @property
    def out_of_time(self) -> bool:
        """True if sampling ended before the limit, so that lengths are not known."""
        return self.cut > 0 and self.limit < self.asked

    @property
    def p99(self) -> int:
        """The length that 99 of 100 answers stay below."""
        ordered = sorted(self.lengths)
        return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def try_answers(
    config: RunConfig, task: Task, tokenizer: Any, limit: int, part: Split = "train"
) -> Tried:
    """Sample 4 answers to each of the first 8 problems of a part of the task, at the run's
    temperature, and grade them with the run's graders."""
    size = task.size(part)
    items = [task.item(part, index) for index in range(min(GROUPS, size or GROUPS))]
    answers = _sampled(config, tokenizer, items, limit)
    ends = set(end_ids(tokenizer, config.model.path))
    trials, lengths, cut = [], [], 0
    for at, item in enumerate(items):
        group = answers[at * SAMPLES : (at + 1) * SAMPLES]
        own = [_ended(ids, ends) for ids in group]
        cut += sum(not ended for _, ended in own)
        lengths += [len(ids) for ids, _ in own]
        texts = [Response("sampled", decode_response(tokenizer, ids), len(ids)) for ids, _ in own]
        trials.append(Trial(item, [], False, texts))
    label = next(iter(config.tasks))
    rewards = [
        [score.reward for score in scores] for scores in graded(config, {label: trials})[label]
    ]
    known = [reward for group in rewards for reward in group if reward is not None]
    signal = sum(len({r for r in group if r is not None}) > 1 for group in rewards)
    mean = sum(known) / len(known) if known else None
    reached = min(limit, max(map(len, answers)))
    return Tried(tuple(lengths), reached, limit, cut / len(lengths), signal, len(items), mean)


def _ended(ids: Sequence[int], ends: set[int]) -> tuple[list[int], bool]:
    for at, token in enumerate(ids):
        if token in ends:
            return list(ids[: at + 1]), True
    return list(ids), False


def _sampled(
    config: RunConfig, tokenizer: Any, items: Sequence[Item], limit: int
) -> list[list[int]]:
    """Token ids of SAMPLES answers to each item, in its order."""
    import torch
    from transformers import AutoModelForCausalLM

    quiet_libraries()
    on_gpu = torch.cuda.is_available()
    threads = torch.get_num_threads()
    torch.set_num_threads(asked_cores())
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(config.model.path),
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        local_files_only=True,
        trust_remote_code=False,
    )
    device = torch.device("cuda" if on_gpu else "cpu")
    model.to(str(device))
    model.eval()
    pad = padding(tokenizer)
    asked = [
        encode_prompt(tokenizer, item.messages or item.question, config.model) for item in items
    ]
    longest = max(map(len, asked))
    rows = [[pad] * (longest - len(ids)) + ids for ids in asked]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in asked]
    torch.manual_seed(derive_seed(config.seed, "trial", 0))
    with torch.inference_mode():
        out = model.generate(
            input_ids=torch.tensor(rows, device=device),
            attention_mask=torch.tensor(mask, device=device),
            do_sample=True,
            temperature=config.rollout.temperature,
            top_p=1.0,
            top_k=0,
            num_return_sequences=SAMPLES,
            max_new_tokens=limit,
            max_time=TRIAL_S,
            eos_token_id=end_ids(tokenizer, config.model.path) or None,
            pad_token_id=pad,
        )
    torch.set_num_threads(threads)
    del model
    if on_gpu:
        torch.cuda.empty_cache()
    answers: list[list[int]] = out[:, longest:].tolist()
    return answers
