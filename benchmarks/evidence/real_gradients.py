"""Gradients of a pretrained model by answer: bias, variance and N* of corrections (E4).

    python -m benchmarks.evidence.real_gradients [--parts first stale] [--minutes 60] [--only-page]

The learner is SmolLM2-135M on the sums of the demo. Its actors are rounded to FP8 or INT4
(emulated), or have a floor of 1e-6 under each probability, with and without DVP's min-p. In the
parts `stale` the learner is the model after 32 steps of the demo, seed 0, and its actor the model
before these. Answers are drawn from the actor's whole distribution. A gradient is that of an
answer's log-probs with respect to B of fresh adapters (B = 0, rank 16, all linear layers), by
token: an estimator's gradient is the sum of the tokens', each times its weight and the answer's
advantage over the other answers of its prompt. All weights are rlcore's own functions. Gradients
are kept as sketches of 3,072 numbers, whose inner products are those of the gradients in
expectation, with a deviation of at most 2.6% of the norms.

Prompts come in blocks of eight, as in a step of the demo; a block is one line of
`benchmarks/results/evidence/real_gradients.jsonl`, its sketches stay in `cache/evidence`. A block
that is there is not computed again. Each block after the first adds a line of the results so far.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.evidence.real_gradients_page import summed_up, write_page
from benchmarks.harness import machine, rlcore
from rlcore.corrections import functional as F
from rlcore.corrections.dvp import DvpSpec
from rlcore.learner.lora import adapted_layers, add_adapters
from rlcore.learner.specs import LoraSpec
from rlcore.models.specs import TemplateSpec
from rlcore.models.text import encode_prompt, end_ids, load_tokenizer
from rlcore.seeding import derive_seed
from rlcore.tasks.arithmetic import Arithmetic
from rlcore.weights.rounding import round_weights
from rlcore.weights.specs import RoundingSpec

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "evidence" / "real_gradients.jsonl"
SKETCHES = ROOT / "cache" / "evidence" / "real_gradients"
BASE = ROOT / "cache" / "models" / "smollm2-135m"  # made by `rlcore fetch`
AFTER = ROOT / "cache" / "models" / "smollm2-135m-after32"
RUN = ROOT / "runs" / "after32"
TRAINED = (
    *("experiment=demo", "schedule.steps=32", "learner.lr_decay_steps=60", "seed=0"),
    *("evaluation.every=0", "evaluation.at_start=false", "logging=quiet"),
)
TEMPLATE = TemplateSpec(chat_template="off", system_prompt="27 + 15 = 42")  # the demo's
BLOCK, ROWS, SIZE = 8, 16, 3072  # prompts of a block, sequences of a pass, numbers of a sketch
TOP = 20  # log-probs that an actor stores


PLAIN = RoundingSpec()


@dataclass(frozen=True)
class Actor:
    """How an actor's distribution differs from the learner's; `weights` None: the learner's."""

    weights: Path | None = None
    rounding: RoundingSpec = PLAIN
    floor: float = 0.0
    min_p: float = 0.0


FLOOR = 1e-6
ACTORS = {
    "matched": Actor(),
    "fp8": Actor(rounding=RoundingSpec(rounding="fp8")),
    # one scale a tensor leaves nothing of this model: KL of 8 at the demo's answers
    "int4": Actor(rounding=RoundingSpec(rounding="int4", scales="channel")),
    "floor": Actor(floor=FLOOR),
    "floor, dvp": Actor(floor=FLOOR, min_p=DvpSpec().rho),
    "stale 32": Actor(weights=BASE),
}
CHEAP, STALE = ("matched", "fp8", "int4", "floor", "floor, dvp"), ("matched", "stale 32")


@dataclass(frozen=True)
class Part:
    """Prompts, answers of each, digits of both numbers, the most tokens of an answer, actors."""

    prompts: int
    answers: int
    digits: int = 2
    tokens: int = 6
    actors: tuple[str, ...] = CHEAP
    learner: Path = BASE


PARTS = {
    "first": Part(32, 8),
    "stale": Part(32, 8, actors=STALE, learner=AFTER),
    "whole": Part(128, 16),
    "whole stale": Part(128, 16, actors=STALE, learner=AFTER),
    "long": Part(16, 8, digits=8, tokens=12),
}


@dataclass
class Drawn:
    """Answers of an actor to the prompts of a block, prompt by prompt: tokens and mask [N, T],
    log p_inf over the vocabulary [N, T, V]."""

    tokens: Tensor
    mask: Tensor
    logp: Tensor


def prepare(learner: Path) -> None:
    """The model before, and where a part needs it after, 32 steps of the demo, unless there."""
    if not BASE.is_dir():
        rlcore("fetch", "name=smollm2-135m", f"out={BASE}")
    if learner == AFTER and not AFTER.is_dir():
        rlcore("train", *TRAINED, "checkpoint.at_end=true", run_dir=RUN, timeout_s=4 * 3600)
        rlcore("export", f"out={AFTER}", run_dir=RUN)


def load(weights: Path) -> Any:
    """A causal LM of a folder, in float32."""
    return AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()


@cache
def model(weights: Path, rounding: RoundingSpec) -> Any:
    """A causal LM of a folder with frozen weights, rounded as an actor's are."""
    lm = load(weights)
    own = dict(lm.named_parameters())
    with torch.no_grad():
        for name, tensor in round_weights(own, rounding).items():
            own[name].copy_(tensor)
    return lm.requires_grad_(False)


def distribution(logits: Tensor, actor: Actor) -> Tensor:
    """log-probs [N, V] that an actor samples from: its floor, then its min-p."""
    p = logits.double().softmax(-1)
    if actor.floor:
        p = (p + actor.floor) / (1 + p.shape[-1] * actor.floor)
    p = torch.where(p >= actor.min_p * p.amax(-1, keepdim=True), p, 0.0)
    return (p / p.sum(-1, keepdim=True)).log().float()


@torch.no_grad()
def draw(lm: Any, actor: Actor, prompts: Tensor, uniforms: Tensor, ends: Tensor) -> Drawn:
    """Answers to prompts [N, L] by inversion of uniforms [N, T]; a token of `ends` [V] is the
    last."""
    running = torch.ones(len(prompts), dtype=torch.bool)
    past, given = None, prompts
    tokens, masks, logps = [], [], []
    for column in uniforms.T:
        found = lm(given, past_key_values=past, use_cache=True, logits_to_keep=1)
        past, logp = found.past_key_values, distribution(found.logits[:, -1], actor)
        reached = logp.double().exp().cumsum(-1)
        # a share of the whole sum, so that rounding leaves no uniform without a token
        token = torch.searchsorted(reached, column[:, None] * reached[:, -1:], right=True)[:, 0]
        token = token.clamp(max=logp.shape[-1] - 1)
        tokens.append(token)
        masks.append(running)
        logps.append(logp)
        running = running & ~ends[token]
        given = token[:, None]
        if not running.any():
            break
    return Drawn(torch.stack(tokens, 1), torch.stack(masks, 1), torch.stack(logps, 1))


def adapted(lm: Any) -> list[LoraLayer]:
    """Put fresh adapters on a model, frozen ones: their gradients are taken by hooks."""
    add_adapters(lm, LoraSpec(), seed=0, key="learner.lora")
    lm.requires_grad_(False)
    return list(adapted_layers(lm).values())


class Sketched:
    """Sketches of the gradients with respect to B of adapters, by sequence of a pass.

    Each number of a gradient has a random sign and is added to one of `size` sums."""

    def __init__(self, layers: list[LoraLayer], size: int = SIZE, seed: int = 0) -> None:
        self.size = size
        self.signs: list[Tensor] = []
        self.sums: Tensor | None = None  # [N, size], of the pass under way
        generator = torch.Generator().manual_seed(seed)
        for number, layer in enumerate(layers):
            down: Any = layer.lora_B["default"]
            shape = down.weight.shape
            self.signs.append(torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0)
            down.register_forward_hook(self._hook(number))

    def _hook(self, number: int) -> Any:
        def after(layer: nn.Module, given: tuple[Tensor], output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda grad: self._add(number, grad, given[0]))

        return after

    def _add(self, number: int, grad: Tensor, given: Tensor) -> None:
        """B [out, r] has the gradient sum over positions of grad [out] times given [r]."""
        own = (torch.einsum("npo,npr->nor", grad, given.detach()) * self.signs[number]).flatten(1)
        own = nn.functional.pad(own, (0, -own.shape[1] % self.size))
        added = own.view(len(own), -1, self.size).sum(1)
        self.sums = added if self.sums is None else self.sums + added


def token_gradients(
    lm: Any, sketched: Sketched, prefixes: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Sketches [N, size] of the gradient of log p(token | prefix), and log p [N, V], of the
    prefixes [N, L]."""
    found: list[Tensor] = []
    logps: list[Tensor] = []
    for rows, chosen in zip(prefixes.split(ROWS), tokens.split(ROWS)):
        embedded = lm.get_input_embeddings()(rows).requires_grad_(True)
        sketched.sums = None
        logits = lm(inputs_embeds=embedded, logits_to_keep=1, use_cache=False).logits[:, -1]
        logp = logits.log_softmax(-1)
        logp.gather(1, chosen[:, None]).sum().backward()
        assert sketched.sums is not None
        found.append(sketched.sums)
        logps.append(logp.detach())
    return torch.cat(found), torch.cat(logps)


def shared_gradients(
    lm: Any,
    sketched: Sketched,
    prompts: Tensor,
    drawn: Mapping[str, Drawn],
    counted: Mapping[str, Tensor],
) -> dict[str, tuple[Tensor, Tensor]]:
    """By actor the sketch of each token [N, T, size] and log p_ref [N, T, V].

    Answers that begin alike share their first tokens' gradients, also those of different actors.
    prompts [N, L]: of each answer; counted [N]: False where an answer's advantage is 0, which needs
    log-probs alone."""
    prefixes: dict[tuple[int, ...], int] = {}
    nodes: dict[tuple[int, ...], int] = {}
    of_prefix: dict[str, Tensor] = {}
    of_node: dict[str, Tensor] = {}
    for name, own in drawn.items():
        of_prefix[name] = torch.zeros_like(own.tokens)
        of_node[name] = torch.zeros_like(own.tokens)
        for i, t in own.mask.nonzero().tolist():
            whole = (*prompts[i].tolist(), *own.tokens[i, : t + 1].tolist())
            of_prefix[name][i, t] = prefixes.setdefault(whole[:-1], len(prefixes))
            if counted[name][i]:
                of_node[name][i, t] = nodes.setdefault(whole, len(nodes))
    vectors = torch.zeros(max(len(nodes), 1), sketched.size)
    logps = torch.zeros(len(prefixes), lm.config.vocab_size)
    for whole in _by_length(nodes):
        found, logp = token_gradients(lm, sketched, whole[:, :-1], whole[:, -1])
        vectors[[nodes[row] for row in map(tuple, whole.tolist())]] = found
        logps[[prefixes[row] for row in map(tuple, whole[:, :-1].tolist())]] = logp
    seen = {row[:-1] for row in nodes}
    for prefix in _by_length([row for row in prefixes if row not in seen]):
        at = [prefixes[row] for row in map(tuple, prefix.tolist())]
        with torch.no_grad():
            logits = [lm(rows, logits_to_keep=1).logits[:, -1] for rows in prefix.split(ROWS)]
        logps[at] = torch.cat(logits).log_softmax(-1)
    return {name: (vectors[of_node[name]], logps[of_prefix[name]]) for name in drawn}


def _by_length(rows: Iterable[tuple[int, ...]]) -> Iterator[Tensor]:
    """Sequences of one length each, [N, L]."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for row in rows:
        found.setdefault(len(row), []).append(row)
    yield from (torch.tensor(own) for own in found.values())


Weights = dict[str, Tensor]


def weights(drawn: Drawn, ref: Tensor, advantages: Tensor) -> tuple[Weights, dict[str, float]]:
    """The weight of each token [N, T] by estimator, and figures of the mismatch.

    ref [N, T, V]: log p_ref; advantages [N, T]. `jackpot` is the mean over its draws."""
    on, chosen = drawn.mask, drawn.tokens[..., None]
    token_ref, inf = (x.gather(-1, chosen)[..., 0] for x in (ref, drawn.logp))
    accepted = F.obrs_acceptance(token_ref, inf)
    z = torch.minimum(ref.exp(), drawn.logp.exp()).sum(-1)
    top_inf, top_ref = drawn.logp.topk(TOP), ref.topk(TOP)
    lists = (
        *(top_inf.indices, top_inf.values, top_ref.indices, top_ref.values),
        ref.gather(-1, top_inf.indices),
    )
    tails = {"k=20": F.obrs_normalizer(*lists, tail="residual")[0]}
    tails["k=20, no tail"] = F.obrs_normalizer(*lists)[0]

    def jackpot(own: Tensor) -> Tensor:
        calibrated, _, kept = F.obrs_calibrate(own, accepted, on)
        weight = F.jackpot_weight(calibrated, token_ref, token_ref, inf, target="ref")
        return accepted * weight / kept

    adaptive, signals = F.ais(token_ref, inf, advantages, on)
    ratio = (token_ref - inf).where(on, 0.0)
    found = {
        "none": torch.ones_like(inf),
        "sequence IS": ratio.sum(-1, keepdim=True).exp().expand_as(inf),
        "token IS": ratio.exp(),
        "tis C=2": F.tis(token_ref, inf, on, cap=2.0),
        "tis C=5": F.tis(token_ref, inf, on, cap=5.0),
        "tis C=10": F.tis(token_ref, inf, on, cap=10.0),
        "mis": F.mis(token_ref, inf, on, low=0.5, high=2.0),
        "icepop": F.mis(token_ref, inf, on, low=0.5, high=5.0),
        "ais": adaptive,
        "jackpot": jackpot(z),
        **{f"jackpot, {name}": jackpot(own) for name, own in tails.items()},
    }
    outside = token_ref < ref.amax(-1) + math.log(DvpSpec().rho)
    found["dvp"] = (~outside).to(inf)
    shares = {name: _mean(found[name] != 0, on) for name in ("mis", "icepop", "dvp")}
    shares |= {"tis C=2": _mean(ratio.exp() <= 2.0, on), "jackpot": _mean(accepted, on)}
    figures = {
        "kl": _mean((drawn.logp.exp() * (drawn.logp - ref)).nan_to_num(0.0).sum(-1), on),
        "ess": float(F.mismatch_values(F.mismatch_accumulate(token_ref, inf, on))["ess"]),
        "acceptance": _mean(z, on),
        "alpha": signals["alpha"],
        "floor_tokens": F.floor_tokens(token_ref, inf, outside, on).mean().item(),
        "tokens": on.sum(-1).double().mean().item(),
    }
    return found, figures | {f"kept by {name}": share for name, share in shares.items()}


def _mean(value: Tensor, on: Tensor) -> float:
    return value.double()[on].mean().item()


def advantages(rewards: Tensor) -> Tensor:
    """[P, K] rewards, less the mean of the other answers of the prompt."""
    return (rewards - rewards.mean(1, keepdim=True)) * rewards.shape[1] / (rewards.shape[1] - 1)


@dataclass(frozen=True)
class Setting:
    """What the blocks of a part share."""

    name: str
    part: Part
    task: Arithmetic
    tokenizer: Any
    ends: Tensor  # [V]: the answer stops there

    @classmethod
    def of(cls, name: str) -> Setting:
        part = PARTS[name]
        tokenizer = load_tokenizer(part.learner)
        task = Arithmetic(
            **{"min_digits": part.digits, "max_digits": part.digits},
            **{"question": "{a} {op} {b} =", "credit": "digits"},
        )
        vocab = model(part.learner, PLAIN).config.vocab_size
        ends = torch.tensor(["\n" in tokenizer.decode([i]) for i in range(vocab)])
        ends[end_ids(tokenizer, part.learner)] = True
        return cls(name, part, task, tokenizer, ends)

    def prompts(self, block: int) -> list[int]:
        return list(range(BLOCK * block, BLOCK * (block + 1)))

    def encoded(self, block: int) -> Tensor:
        """[P K, L], each prompt once for each of its answers; digits are tokens of their own, so
        that all have one length."""
        asked = [self.task.item("heldout", i).question for i in self.prompts(block)]
        ids = torch.tensor([encode_prompt(self.tokenizer, q, TEMPLATE) for q in asked])
        return ids.repeat_interleave(self.part.answers, 0)

    def rewards(self, block: int, drawn: Drawn) -> Tensor:
        """[P, K]."""
        found = []
        for i, prompt in enumerate(self.prompts(block)):
            item = self.task.item("heldout", prompt)
            for j in range(i * self.part.answers, (i + 1) * self.part.answers):
                text = self.tokenizer.decode(
                    drawn.tokens[j][drawn.mask[j]].tolist(), skip_special_tokens=True
                )
                found.append(self.task.grade(item, text.split("\n")[0]).reward)
        return torch.tensor(found).view(-1, self.part.answers)


def compute(setting: Setting, lm: Any, sketched: Sketched, block: int) -> dict[str, Any]:
    """One block: its sketches into the cache, its figures as a line."""
    began, part = time.monotonic(), setting.part
    prompts = setting.encoded(block)
    drawn = {}
    for number, name in enumerate(part.actors):
        actor = ACTORS[name]
        seed = derive_seed(0, f"gradients {setting.name}", block, number)
        uniforms = torch.from_numpy(np.random.default_rng(seed).random((len(prompts), part.tokens)))
        own = model(actor.weights or part.learner, actor.rounding)
        drawn[name] = draw(own, actor, prompts, uniforms, setting.ends)
    rewards = {name: setting.rewards(block, own) for name, own in drawn.items()}
    earned = {name: advantages(own).flatten() for name, own in rewards.items()}
    counted = {name: own != 0 for name, own in earned.items()}
    gradients = shared_gradients(lm, sketched, prompts, drawn, counted)
    line: dict[str, Any] = {"part": setting.name, "block": block, "actors": {}}
    kept = {}
    for name, (vectors, ref) in gradients.items():
        a = earned[name][:, None].expand_as(drawn[name].mask)
        found, figures = weights(drawn[name], ref, a)
        for estimator, w in found.items():
            coefficients = torch.where(drawn[name].mask, w * a, 0.0)
            own = torch.einsum("nt,ntd->nd", coefficients, vectors)
            kept[f"{name}/{estimator}"] = own.view(BLOCK, part.answers, -1).mean(1).numpy()
        line["actors"][name] = {**figures, "reward": rewards[name].mean().item()}
    SKETCHES.mkdir(parents=True, exist_ok=True)
    with (SKETCHES / f"{setting.name}-{block}.npz").open("wb") as out:
        np.savez(out, allow_pickle=False, **kept)
    return {**line, "seconds": round(time.monotonic() - began, 1), "machine": machine()}


def lines() -> list[dict[str, Any]]:
    return [json.loads(row) for row in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def append(line: Mapping[str, Any]) -> None:
    with RESULTS.open("a") as out:
        out.write(json.dumps(_rounded(line)) + "\n")
    print({k: v for k, v in line.items() if k in ("part", "block", "seconds")}, flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.5g}")
    return None if isinstance(value, float) else value


def due(name: str) -> Iterator[int]:
    """Blocks of a part without a line, or whose sketches this machine lacks."""
    done = {line["block"] for line in lines() if line["part"] == name and "block" in line}
    for block in range(PARTS[name].prompts // BLOCK):
        if block not in done or not (SKETCHES / f"{name}-{block}.npz").exists():
            yield block


def run_part(name: str, stop: float) -> None:
    """The missing blocks of a part, and after each the results so far."""
    if next(due(name), None) is None:
        return
    prepare(PARTS[name].learner)
    setting, lm = Setting.of(name), load(PARTS[name].learner)
    sketched = Sketched(adapted(lm))
    for block in due(name):
        if time.monotonic() > stop:
            return
        append(compute(setting, lm, sketched, block))
        conclude(name)


def conclude(name: str) -> None:
    """Add the results of a part's blocks so far; the last such line counts."""
    files = [SKETCHES / f"{name}-{b}.npz" for b in range(PARTS[name].prompts // BLOCK)]
    blocks = [np.load(file) for file in files if file.exists()]
    if len(blocks) > 1:
        vectors = {key: np.concatenate([b[key] for b in blocks]) for key in blocks[0].files}
        append({"part": name, "results": summed_up(vectors, PARTS[name].answers)})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART"
    )
    parser.add_argument("--minutes", type=float, default=240, help="start no block after these")
    parser.add_argument("--only-page", action="store_true", help="compute nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    stop = time.monotonic() + 60 * args.minutes
    if not args.only_page:
        for name in args.parts:
            run_part(name, stop)
    write_page(lines(), {name: part.prompts // BLOCK for name, part in PARTS.items()})


if __name__ == "__main__":
    main()
