"""Error of Jackpot's Z over the top k against Z over the whole vocabulary, on real rollouts.

    python benchmarks/jackpot_normaliser.py --model FOLDER [--rounding int4] [--prompts 64]
                                            [--k 2 3 5 10 20]

An engine with emulated low-precision weights samples answers and returns log-probs of the whole
vocabulary; those of the policy come from transformers on the same tokens. Every estimate uses these
two distributions: `tail` none or residual, `missing` zero or bound, before and after calibration by
kappa. The model given should be warmed up (peaked distributions); it is compared with an untrained
model of the same shape (nearly uniform ones).
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import machine, table

from rlcore.corrections.functional import obrs_acceptance, obrs_calibrate, obrs_normalizer
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.tasks import make_task
from rlcore.testing.records import make_sampling
from rlcore.types import Request, Trajectory

LOG_ZERO = -1e9
MAX_LEN = 128
UNTRAINED = FreshModelSpec(
    hidden_size=192,
    layers=4,
    heads=6,
    kv_heads=2,
    head_dim=32,
    intermediate_size=512,
    vocab_size=64,
)


def rollouts(model: str, rounding: Any, prompts: int) -> tuple[list[Trajectory], int]:
    """Eight samples a prompt with log-probs of the whole vocabulary; the vocabulary's size."""
    from transformers import AutoConfig, AutoTokenizer

    from rlcore.rollout.registry import start_engine
    from rlcore.rollout.specs import ActorSpec, EngineJob

    vocab = AutoConfig.from_pretrained(model).vocab_size
    tokenizer, task = AutoTokenizer.from_pretrained(model), make_task("digits", {})
    spec = make_sampling(max_new_tokens=16, logprobs_k=vocab)
    actor = ActorSpec(kv_cache_gib=0.25, rounding=rounding)
    engine = start_engine(EngineJob(actor, "bench-0", model, MAX_LEN, logprobs_k=vocab))
    for g in range(prompts):
        item = task.item("train", g)
        ids = np.array(tokenizer.encode(item.question), np.int32)
        engine.add([Request(g, i, item.prompt_id, ids, spec, seed=8 * g + i) for i in range(8)])
    done: list[Trajectory] = []
    while engine.unfinished():
        done += engine.step()
    engine.close()
    return done, vocab


@torch.no_grad()
def distributions(
    model: str, done: list[Trajectory], vocab: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log p_inf [1, N, V], log p_ref [1, N, V] and sampled ids [1, N] of all responses."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    inf, ref, sampled = [], [], []
    for t in done:
        full = torch.full((len(t.logp_inf), vocab), LOG_ZERO)
        full.scatter_(1, torch.from_numpy(t.topk_ids).long(), torch.from_numpy(t.topk_logp).float())
        ids = torch.from_numpy(t.token_ids).long()
        logits = policy(ids[None]).logits[0, len(t.prompt_ids) - 1 : -1].float()
        inf.append(full)
        ref.append(logits.log_softmax(-1))
        sampled.append(torch.from_numpy(t.sampled_ids).long())
    return torch.cat(inf)[None], torch.cat(ref)[None], torch.cat(sampled)[None]


def estimates(
    inf: torch.Tensor, ref: torch.Tensor, sampled: torch.Tensor, ks: list[int], lam: float
) -> list[dict[str, Any]]:
    """One row for each k, tail and missing."""
    whole = torch.minimum(inf.exp(), ref.exp() / lam).sum(-1)
    at = [x.gather(-1, sampled[..., None])[..., 0] for x in (ref, inf)]
    accepted, mask = obrs_acceptance(*at, lam=lam), torch.ones(sampled.shape)
    rows = []
    for k, tail, missing in product(ks, ("none", "residual"), ("zero", "bound")):
        mine, own = inf.topk(k, dim=-1), ref.topk(k, dim=-1)
        z, unknown = obrs_normalizer(
            *(mine.indices, mine.values, own.indices, own.values, ref.gather(-1, mine.indices)),
            lam=lam,
            missing=missing,
            tail=tail,
        )
        fixed, kappa, _ = obrs_calibrate(z, accepted, mask, lam=lam)
        rows.append(
            {
                "k": k,
                "tail": tail,
                "missing": missing,
                "mean |Z_k - Z|": float((z - whole).abs().mean()),
                "max": float((z - whole).abs().max()),
                "kappa": kappa,
                "calibrated: mean": float((fixed - whole).abs().mean()),
                "calibrated: max": float((fixed - whole).abs().max()),
                "unknown share": float(unknown.mean()),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a warmed-up model of the digits task")
    parser.add_argument("--rounding", default="int4", choices=["none", "fp8", "int8", "int4"])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--k", type=int, nargs="+", default=[2, 3, 5, 10, 20])
    parser.add_argument("--lam", type=float, default=1.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        untrained = build_fresh_model(
            Path(folder) / "m", "0123456789=", UNTRAINED, seed=0, max_len=MAX_LEN
        )
        for name, model in (("warmed up", args.model), ("untrained", str(untrained))):
            done, vocab = rollouts(model, args.rounding, args.prompts)
            inf, ref, sampled = distributions(model, done, vocab)
            kl = float((inf.exp() * (inf - ref)).sum(-1).mean())
            top = float(inf.exp().amax(-1).mean())
            print(
                f"\n{name}: {sampled.shape[1]} tokens, vocabulary {vocab}, weights {args.rounding}"
                f", KL(p_inf||p_ref) {kl:.4f} nats, mean probability of the top token {top:.2f}\n"
            )
            print(table(estimates(inf, ref, sampled, args.k, args.lam)))
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
