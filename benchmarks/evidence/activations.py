"""How far rounded weights and rounded activations take actors from SmolLM2-135M, by format.

    python -m benchmarks.evidence.activations [--blocks 2] [--minutes 60] [--formats nvfp4 ...]

Actors answer the sums of the demo (`real_gradients.py`) with weights rounded, with what linear maps
read rounded (each token by itself, as `actor.*.activations` does), and with both. The embedding and
the head stay as they are. Answers are drawn with the same numbers by every actor, and the policy in
float32 scores them over the whole vocabulary: KL, total variation, effective samples, and the drift
of `mismatch/drift`. A block is eight prompts with eight answers each. Each block of an actor is one
line of `benchmarks/results/activations_cpu.jsonl`; one that is there is not computed again.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.evidence.real_gradients import (
    ACTORS,
    BASE,
    Drawn,
    Setting,
    advantages,
    draw,
    load,
    prepare,
)
from benchmarks.harness import machine, table
from rlcore.corrections import functional as F
from rlcore.seeding import derive_seed
from rlcore.weights.rounding import round_rows, round_weights
from rlcore.weights.specs import RoundingSpec

FILE = Path(__file__).resolve().parents[1] / "results" / "activations_cpu.jsonl"
FORMATS = ("nvfp4", "mxfp4", "int8", "fp8")
WHAT = ("weights", "activations", "both")
TOP = 20  # log-probs that an actor stores
SCALES = {"int8": "channel", "fp8": "channel"}  # of weights


def rounded(lm: Any, form: str, what: str) -> Any:
    """A copy of the policy that computes as such an actor."""
    actor = copy.deepcopy(lm)
    if what != "activations":
        spec = RoundingSpec(rounding=form, scales=SCALES.get(form, "tensor"))
        own = dict(actor.named_parameters())
        with torch.no_grad():
            for name, tensor in round_weights(own, spec).items():
                own[name].copy_(tensor)
    if what != "weights":
        for name, module in actor.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                module.register_forward_pre_hook(lambda _, given: (round_rows(given[0], form),))
    return actor


@torch.no_grad()
def figures(lm: Any, setting: Setting, block: int, drawn: Drawn) -> dict[str, Any]:
    """Sums of a block over its tokens, and the squared drift and gradient."""
    prompts, on, width = setting.encoded(block), drawn.mask, drawn.tokens.shape[1]
    whole = torch.cat([prompts, drawn.tokens], 1)
    out = lm(whole, output_hidden_states=True, use_cache=False, logits_to_keep=width + 1)
    ref = out.logits[:, :-1].log_softmax(-1)
    hidden = out.hidden_states[-1][:, -width - 1 : -1]
    rewards = setting.rewards(block, drawn)
    earned = advantages(rewards).flatten()[:, None].expand_as(on)
    top = drawn.logp.topk(TOP)
    flat = (hidden.flatten(0, 1), ref.exp().flatten(0, 1), torch.ones(on.numel(), 1))
    sketch = F.last_layer_sketch(*flat, drawn.tokens.flatten()).view(*on.shape, -1)
    statistics = F.policy_drift_accumulate(
        *(top.indices, top.values, ref.gather(-1, top.indices)),
        token_ids=drawn.tokens,
        sketch=sketch,
        advantages=earned,
        mask=on,
        group_ids=torch.arange(len(on)) // setting.part.answers,
        step=block,
    )
    drift, gradient = F.policy_drift(statistics)
    p, q = ref.double().exp(), drawn.logp.double().exp()
    kl = (q * (drawn.logp.double() - ref.double())).sum(-1)
    chosen = drawn.tokens[..., None]
    ratio = (ref.gather(-1, chosen) - drawn.logp.gather(-1, chosen)).double().exp()[..., 0][on]
    return {
        "tokens": int(on.sum()),
        "kl": float(kl[on].sum()),
        "tv": float(0.5 * (q - p).abs().sum(-1)[on].sum()),
        "ratio": float(ratio.sum()),
        "square": float(ratio.square().sum()),
        "drift": drift,
        "gradient": gradient,
        "reward": float(rewards.mean()),
    }


def lines() -> list[dict[str, Any]]:
    """Of all blocks that are there."""
    return [json.loads(row) for row in FILE.read_text().splitlines()] if FILE.exists() else []


def shown(found: list[dict[str, Any]]) -> list[dict[str, str]]:
    """A row for each actor, over its blocks."""
    rows = []
    for form in FORMATS:
        for what in WHAT:
            own = [r for r in found if (r["format"], r["what"]) == (form, what)]
            if not own:
                continue
            total = {k: sum(r[k] for r in own) for k in ("tokens", "kl", "tv", "ratio", "square")}
            drift, gradient = (sum(r[k] for r in own) for k in ("drift", "gradient"))
            known = f"{(max(drift, 0.0) / gradient) ** 0.5:.3f}" if gradient > 0 else "none seen"
            tokens = total["tokens"]
            rows.append(
                {
                    "format": form,
                    "rounded": what,
                    "tokens": str(tokens),
                    "KL (nats a token)": f"{total['kl'] / tokens:.4f}",
                    "total variation": f"{total['tv'] / tokens:.3f}",
                    "effective samples": f"{total['ratio'] ** 2 / tokens / total['square']:.2f}",
                    "drift": known,
                    "reward": f"{fmean(r['reward'] for r in own):.2f}",
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=60, help="start no block after these")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    stop = time.monotonic() + 60 * args.minutes
    prepare(BASE)
    lm, setting = load(BASE), Setting.of("first")
    for block in range(args.blocks):
        seed = derive_seed(0, "activations", block)
        shape = (8 * setting.part.answers, setting.part.tokens)
        uniforms = torch.from_numpy(np.random.default_rng(seed).random(shape))
        for form, what in ((f, w) for f in args.formats for w in WHAT):
            key = {"format": form, "what": what, "block": block}
            if time.monotonic() > stop or any(key.items() <= r.items() for r in lines()):
                continue
            actor = rounded(lm, form, what)
            drawn = draw(actor, ACTORS["matched"], setting.encoded(block), uniforms, setting.ends)
            line = {**key, **figures(lm, setting, block, drawn)}
            with FILE.open("a") as out:
                out.write(json.dumps(line) + "\n")
            print(line, flush=True)
    print(f"\n{machine()}\n\n{table(shown(lines()))}")


if __name__ == "__main__":
    main()
