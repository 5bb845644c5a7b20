"""The learner alone on samples of an exact age: no Ray, no engine; the policy itself is sampled, or
an actor that differs from it.

The task is to sort 8 to 16 digits, or as many as `problems` is asked for. Problems and draws of a
batch depend on the seed and the batch's number, so that runs of one seed see the same problems in
the same order.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlcore.corrections.specs import CORRECTIONS
from rlcore.learner.rank import LearnerRank
from rlcore.learner.sequences import TokenSequence
from rlcore.learner.specs import LearnerJob, LearnerSpec, RankPlace
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.registry import load_object
from rlcore.seeding import derive_seed
from rlcore.testing.records import make_group, make_sampling, make_trajectory
from rlcore.types import Group
from rlcore.weights.specs import RoundingSpec

LEAST, MOST = 8, 16  # digits of a problem
NEW = MOST + 2  # most tokens of an answer
GROUPS, SAMPLES = 16, 8
HELD_OUT = 512  # problems, one sampled answer each
END = 1
ALPHABET = "0123456789="
IDS = {c: i + 3 for i, c in enumerate(ALPHABET)}
CHARACTERS = {i: c for c, i in IDS.items()}


class Problem(NamedTuple):
    prompt: list[int]
    answer: str


class Sampled(NamedTuple):
    """An answer of S tokens with its log-probs [S] float32, the reward of its text, and the actor's
    likeliest ids and their log-probs [S, k]."""

    ids: list[int]
    logp: np.ndarray
    reward: float
    top_ids: np.ndarray
    top_logp: np.ndarray


def problems(
    seed: int, purpose: str, index: int, count: int, lengths: tuple[int, int] = (LEAST, MOST)
) -> list[Problem]:
    """`count` problems of at least and at most so many digits, which sorted are the answers."""
    rng = np.random.default_rng(derive_seed(seed, purpose, index))
    given = [int(rng.integers(lengths[0], lengths[1] + 1)) for _ in range(count)]
    texts = ["".join(map(str, rng.integers(0, 10, length))) for length in given]
    return [Problem([IDS[c] for c in f"{t}="], "".join(sorted(t))) for t in texts]


def reward(text: str, answer: str) -> float:
    """Share of characters at their places."""
    return sum(a == b for a, b in zip(text, answer)) / max(len(text), len(answer))


class Draw(NamedTuple):
    """The ways in which answers are drawn and judged."""

    most: int = NEW  # tokens of an answer
    top: int = 0  # log-probs that are kept of each token
    noise: float = 0.0  # deviation of what is added to each logit, anew for each token
    groups: int = GROUPS
    samples: int = SAMPLES  # of each problem
    judge: Callable[[str, str], float] = reward


PLAIN = Draw()


@torch.no_grad()
def sample(lm: Any, asked: Sequence[Problem], seed: int, how: Draw = PLAIN) -> list[Sampled]:
    """An answer to each problem at temperature 1; equal seeds draw alike."""
    rng = torch.Generator().manual_seed(seed)
    width = max(len(p.prompt) for p in asked)
    ids = torch.tensor([[0] * (width - len(p.prompt)) + p.prompt for p in asked])
    seen = torch.tensor([[0] * (width - len(p.prompt)) + [1] * len(p.prompt) for p in asked])
    place = (seen.cumsum(1) - 1).clamp(min=0)
    cache, given, tokens, logps, tops = None, ids, [], [], []
    ended = torch.zeros(len(asked), dtype=torch.bool)
    while len(tokens) < how.most and not ended.all():
        out = lm(
            input_ids=given,
            attention_mask=seen,
            position_ids=place,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, logits = out.past_key_values, out.logits[:, -1].float()
        if how.noise:
            logits = logits + how.noise * torch.randn(logits.shape, generator=rng)
        logp = logits.log_softmax(-1)
        token = torch.multinomial(logp.exp(), 1, generator=rng)
        tokens.append(token)
        logps.append(logp.gather(1, token))
        tops.append(logp.topk(how.top))
        ended = ended | (token[:, 0] == END)
        given, place = token, place[:, -1:] + 1
        seen = torch.cat([seen, torch.ones_like(token)], 1)
    likeliest = torch.stack([t.indices for t in tops], 1), torch.stack([t.values for t in tops], 1)
    columns = torch.cat(tokens, 1), torch.cat(logps, 1), *likeliest
    return [_answer(how, *of) for of in zip(asked, *columns, strict=True)]


def _answer(
    how: Draw, problem: Problem, tokens: Tensor, logp: Tensor, top: Tensor, top_logp: Tensor
) -> Sampled:
    """Up to the first END. Tokens and log-probs [T], of the likeliest [T, k]."""
    row = tokens.tolist()
    ids = row[: row.index(END) + 1] if END in row else row
    text = "".join(CHARACTERS.get(i, "?") for i in ids if i != END)
    kept = slice(len(ids))
    judged = how.judge(text, problem.answer)
    stored = top[kept].int().numpy(), top_logp[kept].numpy()
    return Sampled(ids, logp[kept].numpy(), judged, *stored)


def batch(
    lm: Any,
    seed: int,
    number: int,
    version: int,
    lengths: tuple[int, int] = (LEAST, MOST),
    how: Draw = PLAIN,
) -> list[Group]:
    """The groups of batch `number`, sampled from an actor as it is, at `version`."""
    asked = problems(seed, "problems", number, how.groups, lengths)
    repeated = [p for p in asked for _ in range(how.samples)]
    drawn = sample(lm, repeated, derive_seed(seed, "draws", number), how)
    groups = []
    for g, problem in enumerate(asked):
        own = drawn[g * how.samples : (g + 1) * how.samples]
        records = [
            make_trajectory(
                number * how.groups + g,
                s,
                turns=[(problem.prompt, one.ids)],
                version=version,
                logp_inf=one.logp,
                topk_ids=one.top_ids,
                topk_logp=one.top_logp,
                finish_reason="stop" if one.ids[-1] == END else "length",
            )
            for s, one in enumerate(own)
        ]
        rewards = [one.reward for one in own]
        groups.append(
            make_group(records, rewards, admitted_version=version, arrival_version=version)
        )
    return groups


def held_out(lm: Any) -> float:
    """Mean reward on the held-out problems, the same problems and seed of draws each time."""
    drawn = sample(lm, problems(99, "held out", 0, HELD_OUT), 7)
    return float(np.mean([one.reward for one in drawn]))


def learner(
    model: Path,
    spec: LearnerSpec,
    steps: int,
    seed: int,
    *,
    lag: int = 0,
    corrections: Mapping[str, Mapping[str, Any]] | None = None,
    objective: ObjectiveSpec | None = None,
    how: Draw = PLAIN,
    rounding: RoundingSpec | None = None,
) -> LearnerRank:
    """The one rank of a learner, in this process, of a run whose samples are `lag` steps old and
    drawn as `how` says. `rounding`: of the policy's passes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = LearnerJob(
        model_path=str(model),
        learner=spec,
        objective=objective or ObjectiveSpec(),
        corrections={n: load_object(CORRECTIONS[n])(**a) for n, a in (corrections or {}).items()},
        sampling=make_sampling(temperature=1.0, max_new_tokens=how.most, logprobs_k=how.top),
        total_steps=steps,
        run_seed=seed,
        pad_id=0,
        in_flight=lag,
        rounding=rounding,
    )
    rank = LearnerRank(job, RankPlace(0, 1, "127.0.0.1", port, timeout_s=600))
    rank.engine.policy.lm.config.use_cache = True
    return rank


def late_steps(
    rank: LearnerRank, steps: int, lag: int, phase: int, sampled: Callable[[int, int], list[Group]]
) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Steps from 1, each with the mean reward of its samples and its row. Batches of a phase are
    sampled `lag` versions before the phase begins, and the first at version 0. `sampled`: gives
    the batch of a number, at a version."""
    waiting: dict[int, list[Group]] = {}
    for step in range(steps):
        for number in range(step, min(step + lag + phase, steps)):
            if max(0, number - number % phase - lag) == step:
                waiting[number] = sampled(number, step)
        if step % phase == 0:
            rank.begin_phase([waiting[n] for n in range(step, min(step + phase, steps))])
        row = rank.train_step(step)
        scores = [e.score.reward for g in waiting.pop(step) for e in g.episodes]
        yield step + 1, float(np.mean(scores)), row


def make_start(
    folder: Path,
    least: float,
    most: int = 400,
    size: int = 128,
    *,
    lengths: tuple[int, int] = (LEAST, MOST),
    score: Callable[[Any], float] = held_out,
    free: int = 0,
) -> None:
    """A small model after supervised steps of `size` problems, until its held-out `score` is
    `least`, seen every 20 steps. `free`: digits at random that follow each worked answer. Raises
    RuntimeError after `most` steps."""
    fresh = folder.with_name(folder.name + "-fresh")
    shape = FreshModelSpec(hidden_size=192, heads=6, intermediate_size=512, vocab_size=64)
    build_fresh_model(fresh, ALPHABET, shape, seed=3, max_len=2 * max(MOST, lengths[1]) + 16 + free)
    rank = learner(fresh, LearnerSpec(lr=1e-3, lr_warmup_steps=20, betas=(0.9, 0.95)), most, 5)
    lm = rank.engine.policy.lm
    for step in range(most):
        asked = problems(5, "start", step, size, lengths)
        drawn = np.random.default_rng(derive_seed(5, "free", step)).integers(0, 10, (size, free))
        texts = [p.answer + "".join(map(str, row)) for p, row in zip(asked, drawn, strict=True)]
        rank.sft_step(
            step,
            [
                TokenSequence.of_answer(p.prompt, [*(IDS[c] for c in text), END])
                for p, text in zip(asked, texts, strict=True)
            ],
        )
        if step % 20 == 19 and score(lm) >= least:
            part = folder.with_name(folder.name + "-part")
            lm.save_pretrained(part)
            part.rename(folder)
            return
    raise RuntimeError(f"the held-out reward is below {least} after {most} supervised steps")
